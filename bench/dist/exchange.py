"""What the exchange moves: bytes on the wire against the payload, and its time, over gloo ranks of this machine.

    python bench/dist/exchange.py [--sequences 1024] [--out FILE]

Each rank generated every size-th group of 8; lengths are log-normal. `payload` are the fields of the sequences that change
rank (each prompt once per receiving rank); `sent` what the all-to-all carried to other ranks; `table` the ids and lengths
that the assignment is made from; `everything to everyone` what an all-gather of the batch would have carried.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from context import context, show
from ranks import run_ranks

from fastrl.data.balance import CostModel
from fastrl.data.batch import RolloutBatch, cu_seqlens_of
from fastrl.dist.collectives import barrier
from fastrl.dist.exchange import exchange, gather_table, local_columns
from fastrl.trainer.balancing import Exchange, waiting


def rollout(count: int, seed: int = 0) -> RolloutBatch:
    """`count` sequences in groups of 8 as generation leaves them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(count, generator=generator) + 5).long().clamp(1, 4096)
    groups = count // 8
    prompts = torch.randint(32, 512, (groups,), generator=generator)
    total, ids = int(lengths.sum()), torch.arange(count)
    return RolloutBatch(
        prompt_ids=torch.randint(0, 50000, (int(prompts.sum()),), generator=generator),
        prompt_cu_seqlens=cu_seqlens_of(prompts),
        response_ids=torch.randint(0, 50000, (total,), generator=generator),
        cu_seqlens=cu_seqlens_of(lengths),
        group_index=ids // 8,
        group_id=ids // 8,
        sample_id=ids,
        finish_reason=torch.zeros(count, dtype=torch.int8),
        policy_version=torch.zeros(count, dtype=torch.int64),
        response_mask=torch.ones(total, dtype=torch.bool),
        rollout_log_prob=torch.randn(total, generator=generator),
        scores=torch.zeros(count),
        valid=torch.ones(count, dtype=torch.bool),
        components={"math": torch.zeros(count)},
    )


def num_bytes(batch: RolloutBatch) -> int:
    """Bytes of all fields."""
    return sum(value.numel() * value.element_size() for _, value in local_columns(batch))


def one_rank(rank: int, size: int, count: int) -> dict[str, Any]:
    """Exchange this rank's share; what moved, in bytes, and the median time of five."""
    whole = rollout(count)
    batch = whole.select((whole.group_index % size == rank).nonzero().squeeze(1))
    stage = Exchange(CostModel(1.0, 0.1, 1e-4), num_updates=2, share_prompts=True, whole_groups=False)
    table = gather_table(batch)
    destination, balances, before = stage.assign(table, 3, size)
    mine = destination[table.owner == rank]
    payload = sum(num_bytes(batch.select((mine == q).nonzero().squeeze(1))) for q in range(size) if q != rank)
    seconds = []
    for _ in range(5):
        barrier()
        started = time.perf_counter()
        moved, traffic = exchange(batch, table, destination)
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    stage.assign(table, 3, size)
    return {
        "payload": payload,
        "sent": traffic.sent,
        "table": traffic.table,
        "batch": num_bytes(batch),
        "sequences": moved.num_sequences,
        "imbalance": waiting([b.loads for b in balances]),
        "imbalance before": waiting(before),
        "exchange_s": sorted(seconds)[2],
        "assign_s": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = []
    for size in (2, 4):
        rows = run_ranks(lambda rank, ranks: one_rank(rank, ranks, options.sequences), size)
        sent, payload = sum(r["sent"] for r in rows), sum(r["payload"] for r in rows)
        everything = sum(r["batch"] for r in rows) * (size - 1)
        cases.append({
            "ranks": size,
            "sequences": options.sequences,
            "sent": sent,
            "payload": payload,
            "sent / payload": round(sent / payload, 6),
            "table / payload": round(sum(r["table"] for r in rows) / payload, 4),
            "sent / everything to everyone": round(sent / everything, 4),
            "imbalance before": round(rows[0]["imbalance before"], 4),
            "imbalance": round(rows[0]["imbalance"], 6),
            "exchange_s": round(max(r["exchange_s"] for r in rows), 4),
            "assign_s": round(max(r["assign_s"] for r in rows), 4),
        })  # fmt: skip
    command = f"python bench/dist/exchange.py --sequences {options.sequences}"
    show({"context": context(command), "cases": cases}, options)


if __name__ == "__main__":
    main()
