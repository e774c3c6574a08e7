"""The method: every variant is compared with a float64 reference first, then the variants are timed in turns.

A wrong result is never timed. One thread, CPU time of that thread, `rounds` rounds of one timing each, alternating, so
that a slow spell of the machine hits all of them; the least and the median are kept.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bench.harness.calls import loops_for
from bench.harness.peers import PeerFailed
from bench.harness.variants import Variant
from bench.kernels.cost_model import Cost

Tensors = list[torch.Tensor]
OURS = "fastrl"
SLOW_FACTOR, SLOW_S = 4.0, 2.0  # two rounds are enough for such a variant
HOPELESS_FACTOR = 16.0  # and one for this


@dataclass
class Case:
    """One thing that is computed in several ways; the name that starts with "fastrl" is ours.

    Args:
        expected: float64 results.
        view: what of a result is compared, e.g. only what lies inside a mask.
        error: distance of a (viewed) result, when it is not a number to be compared with `expected`.
        cost: bytes and operations, for the floor.
        notes: numbers per variant that go into the table (rows computed, imbalance, ...).
        summary: what a variant's result says of itself for the table, e.g. its imbalance.
    """

    name: str
    variants: dict[str, Variant | None]
    expected: Callable[[], Tensors] | None = None
    tolerance: float = 1e-4
    view: Callable[[Tensors], Tensors] = lambda tensors: tensors
    error: Callable[[Tensors], float] | None = None
    cost: Cost | None = None
    dtype: str = "float32"
    rounds: int = 5
    peak: bool = True
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    summary: Callable[[str, Tensors], dict[str, Any]] | None = None


def distance(got: Tensors, want: Tensors) -> float:
    """max over tensors of |got - want| / |want|; infinite for NaN or another shape."""
    if len(got) != len(want):
        return float("inf")
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        if x.shape != y.shape:
            return float("inf")
        off = (x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)
        if not bool(torch.isfinite(off)):
            return float("inf")
        worst = max(worst, float(off))
    return worst


def once_in_smoke(smoke: bool, first: bool) -> None:
    """Skip all but the first size of a test where sizes are replaced by one tiny one."""
    if smoke and not first:
        pytest.skip("one size is enough for a smoke run")


class Measured:
    """A case on its way through the gate and the clock; `rows` is what the table and the results file take."""

    def __init__(self, case: Case, ceilings: dict[str, float]) -> None:
        self.case, self.ceilings = case, ceilings
        self.rows: dict[str, dict[str, Any]] = {}
        self.times: dict[str, list[float]] = {}
        self.loops: dict[str, int] = {}
        self.first_s: dict[str, float] = {}

    def gate(self) -> None:
        """Compare every variant with the reference, and measure the memory of those that are right."""
        case = self.case
        want = case.view(case.expected()) if case.expected is not None else []
        for name, variant in case.variants.items():
            if variant is None:
                continue
            row: dict[str, Any] = {"case": case.name, "variant": name, **case.notes.get(name, {})}
            self.rows[name] = row
            try:
                result, seconds = variant.result()
                got = case.view(result)
                del result
                row["error"] = case.error(got) if case.error is not None else distance(got, want)
                row["tolerance"] = case.tolerance
                if not row["error"] <= case.tolerance:
                    row["wrong"] = True
                    continue
                if case.summary is not None:
                    row |= case.summary(name, got)
                del got
                if case.peak and (peak := variant.peak_bytes()) is not None:
                    row["peak_mib"] = round(peak / 2**20, 2)
                self.loops[name], self.first_s[name] = loops_for(seconds), seconds
                self.times[name] = []
            except PeerFailed as failure:
                row["failed"] = str(failure)

    def turn(self, name: str) -> float:
        """One timing of one variant, in seconds a call."""
        variant = self.case.variants[name]
        assert variant is not None
        try:
            seconds = variant.seconds(self.loops[name])
        except PeerFailed as failure:
            self.rows[name]["failed"] = str(failure)
            del self.times[name]
            return 0.0
        self.times[name].append(seconds)
        return seconds

    def is_enough(self, name: str, ours: str) -> bool:
        """True for a variant that is far slower than ours and takes seconds: one or two rounds settle that."""
        first, base = self.first_s[name], self.first_s[ours]
        slow = first > max(SLOW_FACTOR * base, SLOW_S)
        return slow and len(self.times[name]) >= (1 if first > HOPELESS_FACTOR * base else 2)

    def finish(self) -> list[dict[str, Any]]:
        """Rows with times, ratios to ours, and the fraction of the floor."""
        floor = self.floor_s()
        base = self.times.get(next((n for n in self.times if n.startswith(OURS)), ""))
        for name, seen in self.times.items():
            row, variant = self.rows[name], self.case.variants[name]
            assert variant is not None
            if not seen:
                continue
            row |= {
                "ms_min": round(1e3 * min(seen), 4),
                "ms_median": round(1e3 * statistics.median(seen), 4),
                "rounds": len(seen),
                "loops": self.loops[name],
                "clock": variant.clock,
            }
            if base:
                row["ratio"] = round(statistics.median(seen) / statistics.median(base), 3)
                row["ratio_min"] = round(min(seen) / min(base), 3)
            if floor is not None:
                row["floor_ms"] = round(1e3 * floor, 4)
                row["of_floor"] = round(floor / min(seen), 4)
        return list(self.rows.values())

    def floor_s(self) -> float | None:
        """Seconds that the bytes and the operations take at least, at rates measured in the same session."""
        if self.case.cost is None:
            return None
        peak = self.ceilings[f"matmul_flops_{self.case.dtype}"]
        return self.case.cost.floor_s(self.ceilings["copy_bytes_s"], peak)

    def close(self) -> None:
        """Let go of all inputs."""
        for variant in self.case.variants.values():
            with contextlib.suppress(PeerFailed):
                if variant is not None:
                    variant.close()
