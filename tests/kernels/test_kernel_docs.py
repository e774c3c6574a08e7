"""The examples of docs/kernels.md run as they stand, and there is one for every public function."""

import re
from pathlib import Path

import pytest
from kernel_cases import TRITON

import fastrl.kernels

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)


@pytest.mark.skipif(TRITON, reason="checked on the reference")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: re.findall(r"import (.*)", e)[-1][:40])
def test_example(example):
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})


def test_every_public_function_has_an_example():
    shown = "\n".join(EXAMPLES)
    functions = [name for name in fastrl.kernels.__all__ if name.islower()]
    assert [name for name in functions if not re.search(rf"\b{name}\(", shown)] == []
