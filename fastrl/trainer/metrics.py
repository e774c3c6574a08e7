"""Statistics travel as sums and counts on the device and become numbers once, at the log boundary.

    metrics = Metrics()
    with metrics.timer("generate"):            # time/generate_s
        ...
    metrics.add_mean("policy/entropy", entropy, loss_mask)     # device tensors; nothing waits for the device
    values = metrics.reduce()                  # {"policy/entropy": 0.41, ...}, equal on every rank; starts afresh

A value that is NaN leaves its mean and is counted in `perf/nan_values`; a mean over nothing is left out.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastrl.dist.collectives import all_gather_object, communication_device, is_distributed, world_size
from fastrl.trainer.instruments import GIB, Clock, HostClock, PeakMemory, clock_of, memory_of
from fastrl.trainer.metric_kinds import EMPTY, KINDS, SAME_TWICE, Slots
from fastrl.trainer.metric_names import METRICS, PATTERNS, describe, is_known, policy_stat, unknown_metrics

__all__ = ["METRICS", "PATTERNS", "Metrics", "describe", "is_known", "memory_gib", "policy_stat", "unknown_metrics"]

Number = float | int | Tensor


class Metrics:
    """Accumulates the statistics of one step; see the module's example.

    Args:
        strict: refuse names that are not in METRICS or PATTERNS with KeyError.
        on_phase: called with the name of each phase that `timer` enters.
    """

    def __init__(self, *, strict: bool = False, on_phase: Callable[[str], None] | None = None) -> None:
        self.strict = strict
        self.on_phase = on_phase
        self.muted = False  # True: another rank contributes the same sums (`counted` are this rank's own)
        self.clock: Clock = HostClock()
        self.memory: PeakMemory | None = None
        self._spans: list[tuple[str, Any, Any]] = []  # (name, start, end) marks that `reduce` turns into seconds
        self._slots: dict[str, tuple[str, Slots]] = {}
        self._agreed: list[tuple[str, str]] = []  # (name, kind) that every rank has sent before, in wire order

    def add(self, name: str, sum: Number, count: Number) -> None:
        """Contributes `sum` over `count` items to a mean; a NaN sum is left out with its count."""
        total, number = _scalar(sum), _scalar(count)
        if isinstance(total, Tensor):
            bad = torch.isnan(total)
            total = torch.where(bad, torch.zeros_like(total), total)
            number = number * (~bad)
            self._count_nan(bad)
        elif math.isnan(total):
            self._count_nan(1.0)
            return
        self._put(name, "mean", [total, number])

    def add_sum(self, name: str, value: Number) -> None:
        """Contributes to a total over micro-batches and ranks."""
        self._put(name, "sum", [_scalar(value), 1.0])

    def add_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Contributes `values` [any shape] where `mask` is true (everywhere without one) to a mean."""
        kept, ok = self._kept(values, mask)
        self._put(name, "mean", [kept.sum(), ok.sum(dtype=torch.float64)])

    def add_max(self, name: str, values: Number, mask: Tensor | None = None) -> None:
        """Keeps the largest of the values (a number, or a tensor of any shape, where `mask` is true)."""
        self._put(name, "max", [self._extreme(torch.as_tensor(values, dtype=torch.float64), mask)])

    def add_min(self, name: str, values: Number, mask: Tensor | None = None) -> None:
        """Keeps the smallest of the values (a number, or a tensor of any shape, where `mask` is true)."""
        self._put(name, "min", [self._extreme(-torch.as_tensor(values, dtype=torch.float64), mask)])

    def add_moments(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Contributes to `name`/mean, /std (ddof 1), /min and /max, those of them that are known names."""
        kept, ok = self._kept(values, mask)
        count = ok.sum(dtype=torch.float64)
        mean = kept.sum() / count.clamp(min=1)
        squares = torch.where(ok, (kept - mean).square(), torch.zeros_like(kept)).sum()
        self._put(name, "moments", [count, mean, squares, self._top(-kept, ok), self._top(kept, ok)])

    def add_ess(self, name: str, weights: Tensor, mask: Tensor | None = None) -> None:
        """Contributes to an effective sample size (sum w)^2 / (n sum w^2)."""
        kept, ok = self._kept(weights, mask)
        self._put(name, "ess", [ok.sum(dtype=torch.float64), kept.sum(), kept.square().sum()])

    def add_pearson(self, name: str, x: Tensor, y: Tensor, mask: Tensor | None = None) -> None:
        """Contributes to the correlation of `x` and `y`."""
        ok = ~(torch.isnan(x) | torch.isnan(y)) if mask is None else mask.bool() & ~(torch.isnan(x) | torch.isnan(y))
        a, _ = self._kept(x, ok)
        b, _ = self._kept(y, ok)
        n = ok.sum(dtype=torch.float64)
        self._put(name, "pearson", [n, a.sum(), b.sum(), a.square().sum(), b.square().sum(), (a * b).sum()])

    def add_explained_variance(self, name: str, target: Tensor, prediction: Tensor, mask: Tensor | None = None) -> None:
        """Contributes to 1 - Var(target - prediction) / Var(target)."""
        error = target.detach().double() - prediction.detach().double()
        finite = ~torch.isnan(error)
        t, ok = self._kept(target, finite if mask is None else mask.bool() & finite)
        e, _ = self._kept(error, ok)
        sums = [ok.sum(dtype=torch.float64), t.sum(), t.square().sum(), e.sum(), e.square().sum()]
        self._put(name, "explained_variance", sums)

    def set(self, name: str, value: Number) -> None:
        """Sets a value that is equal on all ranks (the last one counts; the largest if ranks differ)."""
        self._put(name, "value", [0.0, _scalar(value)])

    def add_seconds(self, name: str, seconds: float) -> None:
        """Adds wall time to `name`; over ranks the largest total is shown."""
        self._put(name, "slowest", [float(seconds)])

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is added inside is this rank's own and counts, although the rank is muted."""
        before, self.muted = self.muted, False
        try:
            yield
        finally:
            self.muted = before

    def watch(self, device: torch.device) -> None:
        """Time phases on `device`'s own queue from now on, and keep the peak of its memory (on a CPU: of resident
        memory) for each phase."""
        self.clock, self.memory = clock_of(device), memory_of(device)

    def add_span(self, name: str, start: Any) -> None:
        """Adds the time from the mark `start` (of `clock`) until now to `name`; read at `reduce`."""
        self._spans.append((name, start, self.clock.mark()))

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to `time/<phase>_s`, without waiting for the device, and its peak of memory to
        `memory/peak/<phase>_gib`."""
        if self.on_phase is not None:
            self.on_phase(phase)
        if self.memory is not None:
            self.memory.begin()
        start = self.clock.mark()
        try:
            yield
        finally:
            self.add_span(f"time/{phase}_s", start)
            if self.memory is not None:
                self.add_max(f"memory/peak/{phase}_gib", self.memory.end() / GIB)

    def add_memory(self, device: torch.device | str | None = None) -> None:
        """Contributes the memory figures of this process and device (`memory_gib`), largest over ranks."""
        figures = memory_gib(device)
        if self.memory is not None:  # phases reset the peak that `memory_gib` reads
            name = "device_peak" if "device_peak" in figures else "peak_rss"
            figures[name] = max(figures[name], self.memory.take() / GIB)
        for name, gib in figures.items():
            self.add_max(f"memory/{name}_gib", gib)

    def reduce(self) -> dict[str, float]:
        """Merges all ranks with one collective and returns the numbers, equal on every rank; starts afresh."""
        for name, start, end in self._spans:
            self.add_seconds(name, self.clock.seconds(start, end))
        self._spans = []
        self._slots.setdefault("perf/nan_values", ("sum", [0.0, 1.0]))
        local = {(name, kind): slots for name, (kind, slots) in self._slots.items()}
        merged = self._merge_ranks(local) if is_distributed() and world_size() > 1 else _to_host(local)
        self._slots = {}
        values: dict[str, float] = {}
        for name, kind in sorted(merged):
            _show(name, kind, merged[name, kind], values)
        _derive(values)
        return values

    def _merge_ranks(self, local: dict[tuple[str, str], Slots]) -> dict[tuple[str, str], list[float]]:
        """One gather of a vector laid out by the names agreed on before; new names cost one exchange of names.

        A rank may lack names that others have (no data, no validation): its part of the vector is empty then.
        """
        host = _to_host(local)
        while True:
            new = [key for key in host if key not in set(self._agreed)]
            row = [float(bool(new))]
            for key in self._agreed:
                row += host.get(key, EMPTY[key[1]])
            mine = torch.tensor(row, dtype=torch.float64, device=communication_device())
            rows = [torch.empty_like(mine) for _ in range(world_size())]
            torch.distributed.all_gather(rows, mine)
            table = torch.stack(rows).tolist()
            if not any(r[0] for r in table):
                break
            union = {tuple(key) for names in all_gather_object(new) for key in names}
            self._agreed = sorted(set(self._agreed) | union)
        merged, start = {}, 1
        for key in self._agreed:
            end = start + len(EMPTY[key[1]])
            total = table[0][start:end]
            for r in table[1:]:
                total = KINDS[key[1]][1](total, r[start:end])
            merged[key], start = total, end
        return merged

    def _put(self, name: str, kind: str, slots: Slots) -> None:
        if self.strict:
            shown = [f"{name}/{part}" for part in ("mean", "std", "min", "max")] if kind == "moments" else [name]
            if not any(is_known(n) for n in shown):
                raise KeyError(f"unknown metric {name!r}: add it to fastrl/trainer/metric_names.py with its unit")
        if self.muted and kind not in SAME_TWICE:
            return
        old = self._slots.get(name)
        if old is not None and old[0] != kind:
            raise ValueError(f"metric {name!r} was recorded as a {old[0]} before and as a {kind} now")
        self._slots[name] = (kind, slots if old is None else KINDS[kind][0](old[1], slots))

    def _kept(self, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Values [n] in float64 with 0 where they do not count, and the mask of those that do."""
        flat = values.detach().reshape(-1).to(torch.float64)
        nan = torch.isnan(flat)
        if mask is not None:
            chosen = mask.reshape(-1).to(device=flat.device, dtype=torch.bool)
            nan = nan & chosen
            ok = chosen & ~nan
        else:
            ok = ~nan
        self._count_nan(nan.sum(dtype=torch.float64))
        return torch.where(ok, flat, torch.zeros_like(flat)), ok

    def _extreme(self, values: Tensor, mask: Tensor | None) -> Tensor:
        kept, ok = self._kept(values, mask)
        return self._top(kept, ok)

    @staticmethod
    def _top(kept: Tensor, ok: Tensor) -> Tensor:
        lowest = kept.new_full((1,), -math.inf)
        return torch.cat([torch.where(ok, kept, lowest), lowest]).amax()

    def _count_nan(self, number: Number) -> None:
        if self.muted:
            return
        old = self._slots.get("perf/nan_values", ("sum", [0.0, 0.0]))
        self._slots["perf/nan_values"] = ("sum", [old[1][0] + _scalar(number), 1.0])


def memory_gib(device: torch.device | str | None = None) -> dict[str, float]:
    """Memory of this process now and at its peak, and of `device` when that is a GPU, in GiB.

    Returns:
        `rss`, `peak_rss`, and on a GPU `device`, `device_peak`, `device_total`. The peak of the device is reset.
    """
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
    found = {"rss": _resident_bytes(peak) / GIB, "peak_rss": peak / GIB}
    if device is not None and torch.device(device).type == "cuda":
        found["device"] = torch.cuda.memory_allocated(device) / GIB
        found["device_peak"] = torch.cuda.max_memory_allocated(device) / GIB
        found["device_total"] = torch.cuda.get_device_properties(device).total_memory / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return found


def _resident_bytes(default: float) -> float:
    try:
        with open("/proc/self/statm") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return default


def _scalar(value: Number) -> Any:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(torch.float64)
    return float(value)


def _to_host(local: dict[tuple[str, str], Slots]) -> dict[tuple[str, str], list[float]]:
    """All slots as Python floats, with one copy per device."""
    waiting: dict[torch.device, list[tuple[list[float], int, Tensor]]] = {}
    host: dict[tuple[str, str], list[float]] = {}
    for key, slots in local.items():
        numbers = host[key] = [0.0] * len(slots)
        for i, slot in enumerate(slots):
            if isinstance(slot, Tensor):
                waiting.setdefault(slot.device, []).append((numbers, i, slot))
            else:
                numbers[i] = float(slot)
    for items in waiting.values():
        for (numbers, i, _), number in zip(items, torch.stack([t for _, _, t in items]).tolist()):
            numbers[i] = number
    return host


def _show(name: str, kind: str, slots: list[float], values: dict[str, float]) -> None:
    if kind != "moments":
        value = KINDS[kind][2](slots)
        if value is not None:
            values[name] = value
        return
    count, mean, squares, low, high = slots
    if count == 0:
        return
    shown = {"mean": mean, "min": -low, "max": high}
    if count > 1:
        shown["std"] = math.sqrt(max(squares, 0.0) / (count - 1))
    values.update({f"{name}/{part}": v for part, v in shown.items() if is_known(f"{name}/{part}")})


TRAINING_PHASES = ("old_log_prob", "reference", "values", "update_critic", "update_actor")


def _derive(values: dict[str, float]) -> None:
    """Rates follow from totals over ranks and the slowest rank's time."""
    for rate, total, seconds in (
        ("perf/tokens_per_s", "rollout/tokens", "time/step_s"),
        ("perf/generate_tokens_per_s", "rollout/tokens", "time/generate_s"),
        ("perf/samples_per_s", "rollout/samples", "time/step_s"),
    ):
        if total in values and values.get(seconds, 0.0) > 0:
            values.setdefault(rate, values[total] / values[seconds])
    training = sum(values.get(f"time/{phase}_s", 0.0) for phase in TRAINING_PHASES)
    if training > 0 and "perf/model_flops" in values:
        values["perf/train_tokens_per_s"] = values.get("rollout/tokens", 0.0) / training
        values["perf/flops_per_s"] = values["perf/model_flops"] / training
        if values.get("perf/peak_flops", 0.0) > 0:
            values["perf/mfu"] = values["perf/flops_per_s"] / values["perf/peak_flops"]
