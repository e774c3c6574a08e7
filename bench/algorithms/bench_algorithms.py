"""Times of every estimator, loss and correction on one thread.

    OMP_NUM_THREADS=1 python bench/algorithms/bench_algorithms.py [--samples 4096] [--tokens 1024] [--json FILE]

Ragged responses of 1..2 x --tokens tokens (so --tokens on average), 8 samples a prompt. A loss is timed forward and
backward. Each result is first compared with a slice computed alone, so that a time never belongs to a wrong number.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fastrl.algorithms import (
    get_advantage,
    get_correction,
    get_policy_loss,
    list_advantages,
    list_corrections,
    list_policy_losses,
)
from fastrl.algorithms.entropy import top_entropy_mask
from fastrl.algorithms.rejection import Rule, kept

REQUIRED_OPTIONS = {"dro": {"beta": 0.1}, "kimi": {"beta": 0.1}}


def make_data(samples: int, tokens: int, seed: int = 0) -> dict[str, Any]:
    """A ragged rollout batch in float32."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 2 * tokens, (samples,), generator=g)
    total = int(lengths.sum())

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, generator=g)

    mask = torch.rand(total, generator=g) > 0.05
    old = -normal(total).abs() - 0.01
    return {
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "group_id": torch.arange(samples) // 8,
        "sample_id": torch.arange(samples),
        "scores": (torch.rand(samples, generator=g) > 0.5).float(),
        "valid": torch.ones(samples, dtype=torch.bool),
        "lengths": lengths,
        "greedy_scores": torch.zeros(samples),
        "components": {"a": normal(samples), "b": normal(samples)},
        "response_mask": mask,
        "loss_mask": mask,
        "token_level_rewards": normal(total),
        "values": normal(total),
        "old_log_prob": old,
        "log_prob": old + 0.1 * normal(total),
        "rollout_log_prob": old + 0.01 * normal(total),
        "advantages": normal(total),
        "sum_sq": torch.rand(total, generator=g),
        "entropy": normal(total).abs(),
        "selection": torch.rand(total, generator=g) < 1e-3,
        "staleness": torch.ones(total),
    }


def head(data: dict[str, Any], samples: int) -> dict[str, Any]:
    """The first sequences of the batch."""
    sequences, tokens = data["cu_seqlens"].numel() - 1, int(data["cu_seqlens"][samples])
    out: dict[str, Any] = {}
    for name, value in data.items():
        if name == "cu_seqlens":
            out[name] = value[: samples + 1]
        elif isinstance(value, dict):
            out[name] = {k: v[:samples] for k, v in value.items()}
        else:
            out[name] = value[:samples] if value.numel() == sequences else value[:tokens]
    return out


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Best milliseconds of this thread over a few runs."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return 1e3 * best


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def bench_advantages(data: dict[str, Any], repeats: int) -> dict[str, float]:
    out = {}
    part = head(data, 64)
    for name in list_advantages():
        entry = get_advantage(name)
        if name != "gpg":  # its scale counts the whole batch
            alone = first(entry.call(part))
            torch.testing.assert_close(first(entry.call(data))[: alone.numel()], alone, rtol=1e-4, atol=1e-4)
        out[name] = timed(lambda entry=entry: entry.call(data), repeats)
    return out


def bench_losses(data: dict[str, Any], repeats: int) -> dict[str, float]:
    out = {}
    part = head(data, 64)
    for name in list_policy_losses():
        entry, options = get_policy_loss(name), REQUIRED_OPTIONS.get(name, {})
        alone = entry.call(part, options).loss
        torch.testing.assert_close(entry.call(data, options).loss[: alone.numel()], alone, rtol=1e-4, atol=1e-4)

        def work(entry: Any = entry, options: Any = options) -> None:
            x = data["log_prob"].detach().requires_grad_()
            entry.call(data | {"log_prob": x}, options).loss.sum().backward()

        out[name] = timed(work, repeats)
        if entry.select is not None:
            out[f"{name} (selection)"] = timed(lambda entry=entry: entry.make_selection(data), repeats)
    return out


def bench_corrections(data: dict[str, Any], repeats: int) -> dict[str, float]:
    out = {}
    for name in list_corrections():
        entry = get_correction(name)
        out[name] = timed(lambda entry=entry: entry.call(data), repeats)
    log_weight = data["old_log_prob"] - data["rollout_log_prob"]
    for level in ("token", "seq_sum", "seq_mean", "seq_max"):
        rule = Rule("k3", level, upper=0.01)
        out[f"rule {level}_k3"] = timed(
            lambda rule=rule: kept(rule, log_weight, data["response_mask"], data["cu_seqlens"]), repeats
        )
    out["entropy quantile"] = timed(lambda: top_entropy_mask(data["entropy"], data["loss_mask"], 0.2), repeats)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024, help="mean tokens of a response")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = make_data(arguments.samples, arguments.tokens)
    total = data["log_prob"].numel()
    print(f"{arguments.samples} responses, {total} tokens, 1 thread, torch {torch.__version__}")
    print(f"milliseconds of this thread, best of {arguments.repeats}")
    tables = {
        "advantages": bench_advantages(data, arguments.repeats),
        "policy losses, forward and backward": bench_losses(data, arguments.repeats),
        "corrections and selections": bench_corrections(data, arguments.repeats),
    }
    for title, rows in tables.items():
        print(f"\n{title}")
        for name, ms in rows.items():
            print(f"  {name:<38} {ms:9.1f} ms  {1e6 * ms / total:7.1f} ns/token")
    if arguments.json:
        context = {
            "samples": arguments.samples,
            "tokens": total,
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"command": sys.argv, "context": context, "ms": tables}, file, indent=1)


if __name__ == "__main__":
    main()
