"""The batch-level ops on a CPU against the peers' own functions, one thread, alternating, equal results first.

    OMP_NUM_THREADS=1 python bench/kernels/peers_cpu.py [--json FILE] [--quick]

Run it with the Python of an environment that has the peer (verl, trl); the ones that are absent are left out by name.
Times are medians of the thread's CPU time in milliseconds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

GAE_SIZES = [(64, 1024), (256, 2048), (512, 4096)]
GROUP_SIZES = [1024, 4096, 16384]
LOSS_SIZES = [(64, 1024), (256, 2048)]


class Config:
    """What verl's loss reads of its configuration."""

    clip_ratio, clip_ratio_low, clip_ratio_high, global_batch_info = 0.2, 0.2, 0.28, {}

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def prefix_mask(rows: int, columns: int) -> torch.Tensor:
    """Responses of a quarter to the full length."""
    lengths = torch.randint(columns // 4, columns + 1, (rows, 1))
    return (torch.arange(columns)[None] < lengths).float()


def holes(mask: torch.Tensor) -> torch.Tensor:
    """Turns of tool output of 64 tokens in between."""
    turn = torch.arange(mask.shape[1]) // 64 % 4 == 2
    return mask * (~turn)[None]


def verl_cases() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any], Callable[[Any], torch.Tensor]]]:
    """(name, ours, theirs, what of a result to compare)."""
    from fastrl.kernels.integrations import verl as mine

    theirs = importlib.import_module("verl.trainer.ppo.core_algos")
    gamma, lam = torch.tensor(0.99), torch.tensor(0.95)
    for rows, columns in GAE_SIZES:
        rewards, values = torch.randn(rows, columns), torch.randn(rows, columns)
        prefix = prefix_mask(rows, columns)
        for kind, mask in (("prefix", prefix), ("holes", holes(prefix))):
            data = (rewards, values, mask, gamma, lam)
            yield (
                f"gae + whiten {rows}x{columns} {kind}",
                lambda d=data: mine.compute_gae_advantage_return(*d),
                lambda d=data: theirs.compute_gae_advantage_return(*d),
                lambda r, m=mask: torch.stack([r[0][m > 0], r[1][m > 0]]),
            )
    for samples in GROUP_SIZES:
        rewards, mask = (torch.rand(samples, 1) > 0.5).float(), torch.ones(samples, 1)
        index = np.array([f"prompt-{i // 8}" for i in range(samples)], dtype=object)
        yield (
            f"grouped advantages {samples}",
            lambda r=rewards, m=mask, i=index: mine.compute_grpo_outcome_advantage(r, m, i),
            lambda r=rewards, m=mask, i=index: theirs.compute_grpo_outcome_advantage(r, m, i),
            lambda r: r[0],
        )
    for rows, columns in LOSS_SIZES:
        x, old, adv = (torch.randn(rows, columns) * 0.3 - 1 for _ in range(3))
        mask = prefix_mask(rows, columns)

        def policy(module: Any, d: tuple[torch.Tensor, ...] = (x, old, adv, mask)) -> torch.Tensor:
            y = d[0].clone().requires_grad_()
            module.compute_policy_loss_vanilla(d[1], y, d[2], d[3], "token-mean", Config())[0].backward()
            return y.grad

        def value(module: Any, d: tuple[torch.Tensor, ...] = (x, old, adv, mask)) -> torch.Tensor:
            y = d[0].clone().requires_grad_()
            module.compute_value_loss(y, d[2], d[1], d[3], 0.2)[0].backward()
            return y.grad

        for name, run in (("policy loss + backward", policy), ("value loss + backward", value)):
            yield f"{name} {rows}x{columns}", lambda f=run: f(mine), lambda f=run: f(theirs), lambda r: r * 1e4


def trl_cases() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any], Callable[[Any], torch.Tensor]]]:
    """(name, ours, theirs, what of a result to compare)."""
    from fastrl.kernels.integrations import trl as mine

    theirs = importlib.import_module("trl.trainer.utils")
    logits, index = torch.randn(4, 128, 49152), torch.randint(0, 49152, (4, 128))
    for name in ("selective_log_softmax", "selective_log_softmax_and_entropy"):
        yield (
            f"{name} 512x49152",
            lambda n=name: getattr(mine, n)(logits, index),
            lambda n=name: getattr(theirs, n)(logits, index),
            lambda r: r if isinstance(r, torch.Tensor) else torch.stack(r),
        )


def measure(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median milliseconds of both, alternating."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, kept in ((ours, times[0]), (theirs, times[1])):
            start = time.thread_time()
            run()
            kept.append(1e3 * (time.thread_time() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Print a line per case; with --json also write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds in place of seven")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for peer, cases in (("verl", verl_cases), ("trl", trl_cases)):
        if importlib.util.find_spec(peer) is None:
            print(f"{peer}: not installed")
            continue
        version = importlib.import_module("importlib.metadata").version(peer)
        for name, ours, theirs, compared in cases():
            torch.testing.assert_close(compared(ours()), compared(theirs()), rtol=1e-4, atol=1e-4)
            mine, peers = measure(ours, theirs, 2 if options.quick else 7)
            row = {"case": name, "peer": f"{peer} {version}", "fastrl_ms": round(mine, 3), "peer_ms": round(peers, 3)}
            rows.append(row | {"times_faster": round(peers / mine, 2)})
            print(f"{name:44s} fastrl {mine:9.3f} ms   {peer} {peers:9.3f} ms   {peers / mine:6.1f}x", flush=True)
    if options.json:
        context = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1, "python": sys.version[:6]}
        options.json.write_text(json.dumps({"context": context, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
