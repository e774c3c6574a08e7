"""The stage after generation: every sequence to the rank that trains on it, equal work in each optimizer batch.

Membership of the optimizer batches is decided first, from the ids of all prompts (`plan_optimizer_batches`); ranks are
balanced inside each of them. So the number of ranks decides where a sequence is computed and never with which others
it is averaged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.data.balance import Balance, CostModel, balance, keep_at_home
from fastrl.data.batch import RolloutBatch
from fastrl.data.packing import plan_optimizer_batches
from fastrl.dist.collectives import world_size
from fastrl.dist.exchange import SequenceTable, exchange, gather_table
from fastrl.models.flops import ForwardFlops
from fastrl.trainer.metrics import Metrics


def cost_model(flops: ForwardFlops) -> CostModel:
    """Work of an update in units of a trunk row: what the lengths of sequences are weighed with."""
    return CostModel(row=1.0, head_row=flops.head_row / flops.row, key=flops.key / flops.row)


class Exchange:
    """Assigns and moves the sequences of a rollout.

    Args:
        cost: of rows, head rows and keys.
        num_updates: optimizer batches per rollout.
        share_prompts: whether a prompt is computed once per group and rank.
        whole_groups: whether the advantage estimator needs each group on one rank.
        num_copies: consecutive ranks that train on the same sequences (sequence parallelism).
    """

    def __init__(
        self, cost: CostModel, *, num_updates: int, share_prompts: bool, whole_groups: bool, num_copies: int = 1
    ) -> None:
        self.cost, self.num_updates = cost, num_updates
        self.share_prompts, self.whole_groups, self.num_copies = share_prompts, whole_groups, num_copies

    def __call__(self, batch: RolloutBatch, *, seed: int, metrics: Metrics) -> RolloutBatch:
        """This rank's sequences for training. `seed` orders the prompts into optimizer batches, as in packing."""
        if world_size() == 1:
            metrics.set("perf/imbalance", 0.0)
            return batch
        table = gather_table(batch)
        destination, balances, before = self.assign(table, seed, world_size() // self.num_copies)
        moved, traffic = exchange(batch, table, destination, num_copies=self.num_copies)
        metrics.set("perf/imbalance", waiting([b.loads for b in balances]))
        metrics.set("perf/imbalance/generated", waiting(before))
        metrics.set("perf/split_groups", sum(b.num_split_groups for b in balances))
        metrics.add_sum("perf/exchange_bytes", traffic.sent)
        metrics.add_sum("perf/exchange_table_bytes", traffic.table)
        return moved

    def assign(
        self, table: SequenceTable, seed: int, num_ranks: int
    ) -> tuple[Tensor, list[Balance], list[list[float]]]:
        """Destinations [N], and per optimizer batch the balance and the loads [R] if nothing moved.

        `num_ranks` counts places: ranks, or groups of `num_copies` ranks.
        """
        destination = torch.zeros_like(table.owner)
        balances, before = [], []
        for members in plan_optimizer_batches(table.group_id, num_updates=self.num_updates, seed=seed):
            rows = members[torch.argsort(table.sample_id[members], stable=True)]  # the same for any number of owners
            found = balance(
                table.prompt_length[rows].tolist(),
                table.length[rows].tolist(),
                table.group_id[rows].tolist(),
                num_ranks,
                cost=self.cost,
                share_prompts=self.share_prompts,
                whole_groups=self.whole_groups,
            )
            owner = (table.owner[rows] // self.num_copies).tolist()
            tokens = (table.length[rows] + 1).tolist()
            names = keep_at_home(found.rank, owner, tokens, num_ranks)
            destination[rows] = torch.tensor(names, dtype=torch.int64)
            before.append(self.loads_of(table, rows, owner, num_ranks))
            balances.append(found)
        return destination, balances, before

    def loads_of(self, table: SequenceTable, rows: Tensor, ranks: list[int], num_ranks: int) -> list[float]:
        """Cost per rank [R] of the rows under an assignment that keeps groups whole."""
        loads = [0.0] * num_ranks
        paid: set[tuple[int, int]] = set()
        columns = (table.prompt_length[rows], table.length[rows], table.group_id[rows])
        for prompt, length, group, r in zip(*(c.tolist() for c in columns), ranks):
            if length and ((r, group) not in paid or not self.share_prompts):
                paid.add((r, group))
                loads[r] += self.cost.rows(0, prompt)
            loads[r] += self.cost.response(prompt, length)
        return loads


def waiting(loads: list[list[float]]) -> float:
    """Imbalance of a step: sum over optimizer batches of the heaviest rank, over the sum of the means, less 1."""
    mean = sum(sum(each) / len(each) for each in loads)
    return sum(max(each) for each in loads) / mean - 1.0 if mean > 0 else 0.0
