"""Every case worked out from a public report, through the adapter; skipped where the case files are not at hand."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import adapter
import pytest
import torch
from reported_data import WORDS


def find_cases() -> Path | None:
    """`FASTRL_CASES`, or `shared/cases` in a folder above the repository."""
    if os.environ.get("FASTRL_CASES"):
        return Path(os.environ["FASTRL_CASES"])
    for folder in Path(__file__).resolve().parents:
        for candidate in (folder / "shared" / "cases", folder.parent / "shared" / "cases"):
            if (candidate / "reported_cases.json").is_file():
                return candidate / "reported_cases.json"
    return None


PATH = find_cases()
CASES = [] if PATH is None else json.loads(PATH.read_text(encoding="utf-8"))


def differences(got: Any, want: Any, absolute: float, relative: float, where: str = "") -> list[str]:
    """Where got is not want; null in want is not checked."""
    if want is None:
        return []
    if isinstance(want, dict):
        missing = [f"{where}.{k}: missing" for k in want if k not in got and want[k] != "NaN"]
        return missing + [
            d for k in want if k in got for d in differences(got[k], want[k], absolute, relative, f"{where}.{k}")
        ]
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return [f"{where}: {got} instead of {want}"]
        pairs = enumerate(zip(got, want))
        return [d for k, (g, w) in pairs for d in differences(g, w, absolute, relative, f"{where}[{k}]")]
    want = WORDS.get(want, want) if isinstance(want, str) else want
    if isinstance(want, float) and not math.isfinite(want):
        same = math.isnan(got) if math.isnan(want) else got == want
    elif isinstance(want, (bool, str)) or got is None:
        same = got == want
    else:
        same = math.isfinite(got) and abs(got - want) <= absolute + relative * abs(want)
    return [] if same else [f"{where}: {got} instead of {want}"]


def problems(case: dict[str, Any]) -> list[str]:
    tolerance = (case["tolerance"]["abs"], case["tolerance"]["rel"])
    got = adapter.run_case(case["op"], case["inputs"])
    found = []
    for name, want in case["expected"].items():
        if name.endswith("_any_of"):
            key = name.removesuffix("_any_of")
            if all(differences(got[key], choice, *tolerance) for choice in want):
                found.append(f"{key}: {got[key]} is none of {want}")
        else:
            found += differences(got.get(name, math.nan), want, *tolerance, where=name)
    return found


@pytest.mark.skipif(PATH is None, reason="the case files are not beside the repository")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['id']}-{c['op']}")
def test_case(case):
    if case["device"] == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert problems(case) == []


@pytest.mark.skipif(PATH is None, reason="the case files are not beside the repository")
def test_every_op_is_mapped():
    table = (PATH.parent / "README.md").read_text(encoding="utf-8").split("## What each `op` means")[1].split("## ")[0]
    ops = [line.split("`")[1] for line in table.splitlines() if line.startswith("- `")]
    assert set(ops) == set(adapter.OPS)


def test_every_op_has_a_function():
    for op in adapter.OPS:
        assert callable(adapter.operation(op)), op
    with pytest.raises(KeyError, match="unknown op"):
        adapter.run_case("no_such_op", {})
