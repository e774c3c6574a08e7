"""Optimizer batches and their one division: counts over the whole optimizer batch, all ranks, before any split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import RolloutBatch
from fastrl.data.packing import MicroBatch, empty_micro_batch, keep_tokens
from fastrl.dist.collectives import all_gather_rows, all_reduce_sum, data_group, rank, world_size
from fastrl.kernels import aggregation_scale
from fastrl.trainer.losses import OptimizerBatch


def sequence_sums(values: Tensor, batch: RolloutBatch) -> Tensor:
    """Sum of a [T] quantity (bool counts) over each sequence: [S], int64 for bool input."""
    source = values.to(torch.int64) if values.dtype == torch.bool else values
    return source.new_zeros(batch.num_sequences).index_add_(0, batch.sequence_index, source)


def reduce_one(values: Tensor) -> Tensor:
    """Sum of one tensor over all ranks, each sequence once."""
    return all_reduce_sum([values], data_group())[0]


def gather_own(columns: list[Tensor], group: Any = None) -> tuple[list[Tensor], Tensor]:
    """All ranks' (or the group's) rows of each [n] column, and a mask [N] of the rows that are this rank's own."""
    owner = torch.full_like(columns[0], rank(), dtype=torch.int64)
    *gathered, owners = [all_gather_rows(column, group) for column in [*columns, owner]]
    return gathered, owners == rank()


def optimizer_batch(
    batch: RolloutBatch,
    sequences: Tensor,
    mask: Tensor,
    *,
    loss_agg_mode: str,
    loss_scale_factor: float | None,
    entropy_coef: float = 0.0,
    num_updates_before: int = 0,
    version: int = 0,
    selection: Tensor | None = None,
) -> OptimizerBatch:
    """The members `sequences` [K] with their per-token scale under `mask` [T].

    N_tok, N_seq and N_prompt are counted here, over all ranks' members of this optimizer batch.
    """
    lengths = sequence_sums(mask, batch)[sequences]
    (all_lengths, all_groups), own = gather_own([lengths, batch.group_id[sequences]], data_group())
    scales = aggregation_scale(
        loss_agg_mode, all_lengths, group_id=all_groups, loss_scale_factor=loss_scale_factor, dtype=torch.float64
    )
    per_sequence = torch.zeros(batch.num_sequences, device=scales.device, dtype=scales.dtype)
    per_sequence[sequences] = scales[own]
    scale = torch.where(
        mask, per_sequence[batch.sequence_index], torch.zeros((), dtype=scales.dtype, device=scales.device)
    )
    return OptimizerBatch(
        batch=batch,
        sequences=sequences,
        scale=scale,
        num_tokens=int(all_lengths.sum()),
        entropy_coef=entropy_coef,
        num_updates_before=num_updates_before,
        version=version,
        selection=selection,
    )


def remaining(micro_batches: list[MicroBatch], mask: Tensor) -> list[MicroBatch]:
    """Each micro-batch with the rows that `mask` [T] leaves; without any it goes, or stays as an empty one where other
    ranks wait for the pass."""
    kept = [keep_rows(micro, mask) for micro in micro_batches]
    if world_size() == 1:
        return [micro for micro in kept if micro is not None]
    return [empty_micro_batch(mask.device) if micro is None else micro for micro in kept]


def keep_rows(micro: MicroBatch, mask: Tensor) -> MicroBatch | None:
    """The micro-batch with only the head rows whose token is in `mask` [T], and the rows that those read; None when
    none is left.

    What is masked is never computed by the head, so that nothing there, NaN included, can reach the loss.
    """
    chosen = mask[micro.token_index]
    if bool(chosen.all()):
        return micro if micro.num_tokens else None
    if not bool(chosen.any()):
        return None
    return keep_tokens(micro, chosen)
