"""Comparing what the ranks of a scenario found with the one-rank run."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def same_update(one: dict[str, Any], ranks: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    """Losses, gradients, per-token results and metrics of every rank equal those of the one-rank run."""
    for rank in ranks:
        assert rank.get("losses", []) == pytest.approx(one.get("losses", []), rel=tolerance)
        for own, single in zip(rank["gradients"], one["gradients"], strict=True):
            own, single = torch.tensor(own, dtype=torch.float64), torch.tensor(single, dtype=torch.float64)
            assert single.norm() > 0 and (own - single).norm() <= tolerance * single.norm()
        assert rank.get("passes") == ranks[0].get("passes"), "as many passes on every rank"
        for name, samples in rank["tokens"].items():
            for sample, found in samples.items():
                assert found == pytest.approx(one["tokens"][name][sample], rel=tolerance, abs=1e-12), name
    compared = [n for n in one["metrics"] if not n.startswith(("perf/", "time/", "memory/"))]
    assert compared and set(compared) <= set(ranks[0]["metrics"])
    for metric in compared:
        assert ranks[0]["metrics"][metric] == pytest.approx(one["metrics"][metric], rel=tolerance, abs=1e-12), metric
