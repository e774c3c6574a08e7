"""Every kernel on a GPU: correct first, then timed against eager torch, torch.compile and importable peers.

    python bench/gpu/kernels.py [--out FILE] [--only TEXT] [--budget-s 280] [--device cuda|cpu] [--scale 1.0]

One JSON line a case is written as soon as it is measured. Times are medians of CUDA events on random data with the L2
cache flushed before each run. The ceilings (copy bandwidth, bfloat16 matmul rate) are measured in the same run, and
each time is also given as a fraction of the floor that `bench/kernels/cost_model.py` counts. A variant whose result is
wrong is reported as wrong and not timed. `--device cpu --scale 0.01` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels"), str(HERE.parents[1])]

import torch  # noqa: E402
from cost_model import Cost  # noqa: E402

# modules of this folder with a function cases(device, scale) that yields Case, one at a time
SOURCES = ("head_cases", "batch_cases")
CASE_SECONDS = 0.4  # of measuring, per variant
L2_BYTES = 256 * 2**20


@dataclass
class Case:
    """One op at one size.

    `variants` maps a name ("fastrl", "eager", "compile", a peer) to a call without arguments; all give a tensor or a
    tuple of tensors that has to agree with `expected()` within `tolerance`, relative to its largest value.
    """

    name: str
    cost: Cost
    variants: dict[str, Callable[[], Any]]
    expected: Callable[[], Any]
    tolerance: float = 1e-3
    notes: dict[str, Any] = field(default_factory=dict)


class Timer:
    """Median milliseconds of a call on the device."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.flush = torch.empty(L2_BYTES if self.cuda else 1, dtype=torch.uint8, device=device)

    def once(self, run: Callable[[], Any]) -> float:
        """One timed run behind a cold cache."""
        self.flush.zero_()
        if not self.cuda:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def __call__(self, run: Callable[[], Any], seconds: float = CASE_SECONDS) -> float:
        for _ in range(3):
            run()
        times, stop = [self.once(run)], time.perf_counter() + seconds
        while len(times) < 5 or (time.perf_counter() < stop and len(times) < 200):
            times.append(self.once(run))
        return statistics.median(times)


def ceilings(timer: Timer, device: str) -> dict[str, float]:
    """Measured copy bandwidth (bytes/s, read + written) and bfloat16 matmul rate (flop/s)."""
    n, m = (2**30, 8192) if device == "cuda" else (2**22, 256)
    source = torch.randint(0, 255, (n,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * n / (1e-3 * timer(lambda: target.copy_(source)))
    a, b = (torch.randn(m, m, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = 2 * m**3 / (1e-3 * timer(lambda: a @ b))
    return {"copy_bytes_s": copy, "matmul_flops": product}


def parts(result: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for x in result if isinstance(x, torch.Tensor)]


def error_of(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest expected value; infinite for NaN or another shape."""
    worst = 0.0
    for x, y in zip(parts(got), parts(want), strict=True):
        if x.shape != y.shape:
            return float("inf")
        if x.numel():
            difference = (x.detach().double() - y.detach().double()).abs().max()
            worst = max(worst, float(difference / y.detach().double().abs().max().clamp(min=1e-30)))
            if not bool(torch.isfinite(difference)):
                return float("inf")
    return worst


def measure(case: Case, timer: Timer, top: dict[str, float]) -> Iterator[dict[str, Any]]:
    """A row per variant: wrong, failed or timed."""
    want = case.expected()
    floor = 1e3 * case.cost.floor_s(top["copy_bytes_s"], top["matmul_flops"])
    for name, run in case.variants.items():
        row: dict[str, Any] = {"case": case.name, "variant": name, "floor_ms": round(floor, 5), **case.notes}
        try:
            error = error_of(run(), want)
            row["error"] = error
            if error > case.tolerance:
                yield row | {"wrong": True}
                continue
            if timer.cuda:
                torch.cuda.reset_peak_memory_stats()
            milliseconds = timer(run)
            row |= {"ms": round(milliseconds, 5), "of_floor": round(floor / milliseconds, 3)}
            if timer.cuda:
                row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        except Exception as failure:  # one variant's failure must not take the run
            row["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
        yield row


def all_cases(device: str, scale: float) -> Iterator[Case]:
    """Cases of every source that is there."""
    for source in SOURCES:
        if (HERE / f"{source}.py").exists():
            yield from importlib.import_module(source).cases(device, scale)


def write(out: TextIO, row: dict[str, Any]) -> None:
    """One line, on disk at once."""
    line = json.dumps(row)
    print(line, flush=True)
    if out is not sys.stdout:
        out.write(line + "\n")
        out.flush()


def main() -> int:
    """Run the cases; the exit code is 1 if one of fastrl's results is wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=argparse.FileType("a"), default=sys.stdout)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--budget-s", type=float, default=280.0, help="start no case after this many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every size, to try the script out")
    options = parser.parse_args()
    started, bad = time.perf_counter(), 0
    timer = Timer(options.device)
    top = ceilings(timer, options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    write(options.out, {"device": name, "torch": torch.__version__, "scale": options.scale, **top})
    for case in all_cases(options.device, options.scale):
        if options.only not in case.name:
            continue
        if time.perf_counter() - started > options.budget_s:
            write(options.out, {"case": case.name, "skipped": "out of time"})
            continue
        for row in measure(case, timer, top):
            write(options.out, row)
            bad += row["variant"] == "fastrl" and ("wrong" in row or "failed" in row)
        del case
        gc.collect()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
