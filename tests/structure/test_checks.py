"""The structure tests see what they are for: each finds an offender that is planted."""

from __future__ import annotations

import ast
from functools import cached_property

from source_tree import REPOSITORY, Source
from test_structure import FORBIDDEN_NAMES, identifiers, outside, undocumented


class Planted(Source):
    """A file that exists only here."""

    code = ""

    @property
    def name(self) -> str:
        return "fastrl/planted.py"

    @cached_property
    def text(self) -> str:
        return self.code


def planted(code: str) -> Source:
    kind = type("Code", (Planted,), {"code": code})
    return kind(REPOSITORY / "planted.py")


def test_names_are_found_where_they_are_defined():
    source = planted(
        "def f(cliprange, *, resp_mask=1):\n    self.logps = old_logp = g(kl_coef=2)\n    return x.logprobs\n"
    )
    assert identifiers(source) & FORBIDDEN_NAMES == {"cliprange", "resp_mask", "logps", "old_logp"}


def test_foreign_imports_are_found_lazy_ones_too():
    source = planted(
        "import math\nimport torch.nn\ndef f():\n    from transformers import x\n    import fastrl.config\n"
    )
    assert sorted(outside(source, {"torch"}, ("fastrl.kernels",))) == [
        "fastrl/planted.py imports fastrl.config",
        "fastrl/planted.py imports transformers",
    ]


def test_missing_docstrings_are_found():
    source = planted('def f():\n    pass\ndef _g():\n    pass\ndef h():\n    """Yes."""\n')
    assert undocumented(source, {"f", "h"}) == ["fastrl/planted.py:1 f"]
    assert undocumented(source, set()) == []
    assert undocumented(planted("@register('x')\ndef f():\n    pass\n"), set()) == ["fastrl/planted.py:2 f"]
    assert isinstance(source.tree, ast.Module)
