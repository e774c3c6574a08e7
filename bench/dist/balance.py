"""How evenly sequences are spread over ranks: the balance step against sorted round robin, and against the lower bound.

    python bench/dist/balance.py [--out FILE]

4096 log-normal response lengths in groups of 8, prompts of 32 to 512 tokens, costs of a 7B model (rows, head rows, keys).
Imbalance is max load / mean load - 1, the share of time that the mean rank waits; `over bound` is max load over
max(total / ranks, heaviest sequence) less 1. Round robin deals sequences (or groups) from the heaviest to the lightest.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from context import context, show

from fastrl.data.balance import CostModel, balance

# Forward FLOPs of a 7B decoder in units of a row: 28 layers, 28 heads of 128, V 152064, H 3584, 6.5e9 weights in layers
COST = CostModel(row=1.0, head_row=2 * 152064 * 3584 / 13.05e9, key=4 * 28 * 28 * 128 / 13.05e9)


def loads_of(case: dict[str, list[int]], ranks: list[int], num_ranks: int) -> list[float]:
    """Cost per rank; each rank pays a group's prompt once."""
    loads, paid = [0.0] * num_ranks, set()
    for prompt, length, group, r in zip(case["prompts"], case["lengths"], case["groups"], ranks):
        if (r, group) not in paid:
            paid.add((r, group))
            loads[r] += COST.rows(0, prompt)
        loads[r] += COST.response(prompt, length)
    return loads


def round_robin(case: dict[str, list[int]], num_ranks: int, *, by_group: bool) -> list[int]:
    """Sorted by work, heaviest first, dealt to the ranks in turn."""
    work: dict[int, float] = {}
    for s, (prompt, length, group) in enumerate(zip(case["prompts"], case["lengths"], case["groups"])):
        key = group if by_group else s
        work[key] = work.get(key, COST.rows(0, prompt)) + COST.response(prompt, length)
    rank_of = {key: i % num_ranks for i, key in enumerate(sorted(work, key=lambda k: -work[k]))}
    return [rank_of[group if by_group else s] for s, group in enumerate(case["groups"])]


def measure(num_ranks: int, group_size: int, sigma: float, count: int) -> dict[str, Any]:
    """One case: imbalance of each method."""
    rng = random.Random(0)
    groups = [i // group_size for i in range(count)]
    prompt_of = [rng.randint(32, 512) for _ in range(groups[-1] + 1)]
    case = {
        "groups": groups,
        "prompts": [prompt_of[g] for g in groups],
        "lengths": [max(1, int(rng.lognormvariate(6.0, sigma))) for _ in groups],
    }
    started = time.perf_counter()
    found = balance(case["prompts"], case["lengths"], groups, num_ranks, cost=COST)
    seconds = time.perf_counter() - started
    mean = sum(found.loads) / num_ranks

    def figures(loads: list[float]) -> dict[str, float]:
        return {
            "imbalance": round(max(loads) * num_ranks / sum(loads) - 1, 6),
            "over bound": round(max(loads) / found.lower_bound - 1, 6),
            "work": round(sum(loads) / (mean * num_ranks), 4),  # more where prompts are computed on several ranks
        }

    return {
        "ranks": num_ranks,
        "group size": group_size,
        "sigma": sigma,
        "sequences": count,
        "balance": figures(found.loads) | {"split groups": found.num_split_groups, "seconds": round(seconds, 4)},
        "round robin of groups": figures(loads_of(case, round_robin(case, num_ranks, by_group=True), num_ranks)),
        "round robin of sequences": figures(loads_of(case, round_robin(case, num_ranks, by_group=False), num_ranks)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [measure(r, 8, 1.0, 4096) for r in (2, 8, 64)]
    cases += [measure(64, 8, 1.0, 512), measure(8, 16, 1.5, 128), measure(64, 16, 1.0, 512)]
    show({"context": context("python bench/dist/balance.py"), "cases": cases}, options)


if __name__ == "__main__":
    main()
