"""Refresh the launch table on a card: `python -m fastrl.kernels.tune --out my_table.json [--only scan,token_loss]`.

Each op of `TRIALS` is timed with every candidate configuration at one size per size class; the fastest entries of this
card's architecture are written. Use them with `FASTRL_LAUNCH_TABLE=my_table.json`, or merge them into
`launch_table.json`. Training never tunes: without an entry for the card the `default` one is used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import launch


@dataclass(frozen=True)
class Trial:
    """How an op of the table is tried.

    candidates: the configurations. sizes: one size per size class, ascending, as the table counts them. run: makes the
    call for a size, on random data, to be timed.
    """

    candidates: Sequence[dict[str, Any]]
    sizes: Sequence[int]
    run: Callable[[int], Callable[[], Any]]


def _blocks(*blocks: int, warps: Sequence[int] = (1, 2, 4, 8), **more: Any) -> list[dict[str, Any]]:
    # a thread should own 4 to 32 values: fewer waste the 16-byte loads, more spill
    pairs = [(b, w) for b in blocks for w in warps if 4 <= b // (32 * w) <= 32]
    return [{"BLOCK": b, **more, "num_warps": w} for b, w in pairs]


def _tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y, z = (torch.randn(count, device="cuda") for _ in range(3))
    return x, y, z, torch.rand(count, device="cuda") < 0.9


def _run_scan(length: int) -> Callable[[], Any]:
    from . import gae

    rows = max(1, (1 << 21) // length)
    x, y, _, m = (t.reshape(rows, length) for t in _tokens(rows * length))
    return lambda: gae(x, y, m, gamma=0.99, gae_lambda=0.95)


def _run_token_loss(count: int) -> Callable[[], Any]:
    from . import clipped_policy_loss

    x, y, z, m = _tokens(count)
    x.requires_grad_()
    return lambda: clipped_policy_loss(x, y, z, m)


def _run_elementwise(count: int) -> Callable[[], Any]:
    from . import whiten

    x, _, _, m = _tokens(count)
    return lambda: whiten(x, m, mean=0.0, var=1.0)


def _run_aggregate(count: int) -> Callable[[], Any]:
    from . import aggregate

    x, _, _, m = _tokens(count)
    return lambda: aggregate(x, m)


def _run_stats(length: int) -> Callable[[], Any]:
    from . import masked_stats

    rows = max(1, (1 << 21) // length)
    x, _, _, m = (t.reshape(rows, length) for t in _tokens(rows * length))
    return lambda: masked_stats(x, m, per_sequence=True)


def _run_mismatch(length: int) -> Callable[[], Any]:
    from . import mismatch_stats

    rows = max(1, (1 << 21) // length)
    x, y, _, m = (t.reshape(rows, length) for t in _tokens(rows * length))
    return lambda: mismatch_stats(x, y, m)


def _run_groups(samples: int) -> Callable[[], Any]:
    from . import group_normalize

    scores, ids = torch.rand(samples, device="cuda"), torch.arange(samples, device="cuda") // 8
    return lambda: group_normalize(scores, ids)


def _run_packing(values: int) -> Callable[[], Any]:
    from . import pack_weights

    source = list(torch.randn(16, values // 16, device="cuda").unbind(0))
    bucket = torch.empty(values, dtype=torch.bfloat16, device="cuda")
    return lambda: pack_weights(source, bucket, torch.bfloat16)


def _logits(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = max(1, (1 << 28) // vocabulary)
    logits = torch.randn((rows, vocabulary), dtype=torch.bfloat16, device="cuda")
    return logits, torch.randint(0, vocabulary, (rows,), device="cuda")


def _run_row_statistics(vocabulary: int) -> Callable[[], Any]:
    from . import log_prob

    logits, labels = _logits(vocabulary)
    return lambda: log_prob(logits, labels, want_entropy=True)


def _run_row_gradient(vocabulary: int) -> Callable[[], Any]:
    from . import log_prob

    logits, labels = _logits(vocabulary)
    value = log_prob(logits.requires_grad_(), labels).log_prob.sum()
    return lambda: torch.autograd.grad(value, logits, retain_graph=True)


def _run_row_weighted(vocabulary: int) -> Callable[[], Any]:
    from . import logits_token_loss

    logits, labels = _logits(vocabulary)
    weights = torch.ones(labels.shape, device="cuda")
    # a fresh alias each time: the gradient that took the logits' place is as good as logits for timing
    return lambda: logits_token_loss(logits.detach().requires_grad_(), labels, weights)


def _run_scale_in_place(values: int) -> Callable[[], Any]:
    from .scale_kernel import scale_in_place

    x, factor = torch.randn(values, dtype=torch.bfloat16, device="cuda"), torch.tensor(-1.0, device="cuda")
    return lambda: scale_in_place(x, factor)


_ROWS = [  # a thread loads 8 or 16 bfloat16 values of a row of the tile at a time
    {"DEPTH": depth, "WIDTH": width, "num_warps": warps}
    for depth in (1, 2, 4, 8)
    for width in (512, 1024, 2048, 4096, 8192)
    for warps in (2, 4, 8, 16)
    if width // (32 * warps) in (8, 16) and depth * width <= 32768
]
_SCAN = [
    {"ROWS": rows, "CHUNK_BLOCKS": 4096 // (16 * rows) or 1, "SPLIT_ROWS": 256, "num_warps": rows // 32}
    for rows in (32, 64, 128, 256)
]
TRIALS: dict[str, Trial] = {
    "aggregate": Trial(_blocks(512, 1024, 2048, 4096), (1 << 15, 1 << 21), _run_aggregate),
    "elementwise": Trial(_blocks(512, 1024, 2048, 4096), (1 << 15, 1 << 21), _run_elementwise),
    "group_normalize": Trial(
        [{"BLOCK": b, "TABLE": 512, "num_warps": w} for b in (32, 64, 128) for w in (2, 4, 8)], (16384,), _run_groups
    ),
    "mismatch": Trial(_blocks(512, 1024, 2048, STRETCH=4096), (512, 4096), _run_mismatch),
    "pack_weights": Trial(_blocks(1024, 2048, 4096, PIECE=32768), (1 << 24,), _run_packing),
    "row_gradient": Trial(_ROWS, (8192, 131072), _run_row_gradient),
    "row_statistics": Trial(_ROWS, (8192, 131072), _run_row_statistics),
    "row_weighted": Trial(_ROWS, (8192, 131072), _run_row_weighted),
    "scale_in_place": Trial(_blocks(2048, 4096, 8192, PROGRAMS=1024), (1 << 28,), _run_scale_in_place),
    "scan": Trial(_SCAN, (512, 4096), _run_scan),
    "stats_rows": Trial(_blocks(512, 1024, 2048, STRETCH=4096), (512, 4096), _run_stats),
    "token_loss": Trial(_blocks(512, 1024, 2048, 4096), (1 << 15, 1 << 20), _run_token_loss),
}


def fastest(
    op: str, trial: Trial, size: int, time_ms: Callable[[Callable[[], Any]], float]
) -> tuple[dict[str, Any], float]:
    """The candidate with the smallest time at one size, and that time; one that does not launch is passed by."""
    lookup, best = launch.lookup, None
    call = trial.run(size)
    for candidate in trial.candidates:

        def forced(name: str, arch: str, n: int, chosen: dict[str, Any] = candidate) -> dict[str, Any]:
            return dict(chosen) if name == op else lookup(name, arch, n)

        with mock.patch.object(launch, "lookup", forced):
            try:
                milliseconds = time_ms(call)
            except Exception as failure:
                print(f"{op} {size}: {candidate} does not run: {type(failure).__name__}", file=sys.stderr)
                continue
        if best is None or milliseconds < best[1]:
            best = (candidate, milliseconds)
    if best is None:
        raise RuntimeError(f"tune: no candidate of {op} runs at size {size}")
    return best


def tuned(ops: Iterable[str], arch: str, time_ms: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    """op -> {arch: entries} with the fastest candidate of each size class; limits as in the table."""
    found = {}
    for op in ops:
        trial = TRIALS[op]
        limits = [limit for limit, _ in launch.table()[op]["default"]]
        entries: list[Any] = []
        for limit, size in zip(limits, trial.sizes, strict=True):
            candidate, milliseconds = fastest(op, trial, size, time_ms)
            print(f"{op:16s} size {size:9d}: {milliseconds:8.4f} ms with {candidate}", flush=True)
            entries.append([limit, candidate])
        found[op] = {arch: entries}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of `python -m fastrl.kernels.tune`."""
    parser = argparse.ArgumentParser(prog="python -m fastrl.kernels.tune", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default=",".join(TRIALS), help="ops, separated by commas")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only.split(",")) - set(TRIALS))
    if unknown:
        parser.error(f"--only {','.join(unknown)}: use some of {', '.join(TRIALS)}")
    if not torch.cuda.is_available():
        parser.error("a GPU is needed to time launches; without one the shipped table is used as it is")
    from triton.testing import do_bench

    arch = launch.arch_of(torch.device("cuda", torch.cuda.current_device()))
    options.out.write_text(json.dumps(tuned(options.only.split(","), arch, do_bench), indent=1) + "\n")
    print(f"wrote {options.out}: use it with FASTRL_LAUNCH_TABLE={options.out}")


if __name__ == "__main__":
    main()
