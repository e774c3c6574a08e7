"""Sequence parallelism as the trainer sees it: which head rows are this rank's, and results made whole again.

The ranks of a sequence group hold the same sequences and the same micro-batches. Each computes its rows; what a stage
hands on ([T] log-probs, values) is summed over the group, so that every rank of it goes on with the same batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from fastrl.data.packing import MicroBatch
from fastrl.models.forward import sequence_group
from fastrl.models.sequence_parallel import SequenceGroup, deal_heads


def own_rows(model: nn.Module, micro: MicroBatch) -> MicroBatch:
    """The micro-batch with only the head and bootstrap rows of this rank, numbered among its rows."""
    ranks = sequence_group(model)
    if ranks is None:
        return micro
    head, bootstrap = ranks.owned(micro.head_index), ranks.owned(micro.bootstrap_index)
    return replace(
        micro,
        head_index=ranks.local(micro.head_index[head]),
        labels=micro.labels[head],
        token_index=micro.token_index[head],
        bootstrap_index=ranks.local(micro.bootstrap_index[bootstrap]),
        bootstrap_sequence=micro.bootstrap_sequence[bootstrap],
    )


def merge(model: nn.Module, values: Tensor) -> Tensor:
    """Sum over the sequence group of values [n] that are 0 where a rank has none."""
    ranks = sequence_group(model)
    if ranks is None:
        return values
    total = values.detach().clone()
    torch_dist.all_reduce(total, group=ranks.group)
    return total


def merge_seen(model: nn.Module, values: Tensor) -> Tensor:
    """The same for values that are NaN where a rank has none; NaN stays where no rank has one."""
    if sequence_group(model) is None:
        return values
    missing = values.isnan()
    total = merge(model, torch.where(missing, torch.zeros_like(values), values))
    found = merge(model, (~missing).to(values.dtype))
    return torch.where(found > 0, total / found.clamp(min=1), torch.full_like(total, float("nan")))


def whole_rows(model: nn.Module, micro: MicroBatch, values: Tensor) -> Tensor:
    """Values of this rank's head rows -> those of all N head rows of `micro`, with gradient for this rank's own.

    A loss of whole sequences is computed on every rank of the group; the derivative by a log-prob reaches the rank that
    made it.
    """
    ranks = sequence_group(model)
    if ranks is None:
        return values
    own = ranks.owned(micro.head_index)
    scattered = values.detach().new_zeros(micro.num_tokens)
    scattered[own] = values.detach()
    return merge(model, scattered).index_put((own.nonzero().squeeze(1),), values)


def counts_loss(model: nn.Module) -> bool:
    """True on the rank of a sequence group whose copy of a figure counts."""
    ranks = sequence_group(model)
    return ranks is None or ranks.rank == 0


def share_rows(model: nn.Module, ranks: SequenceGroup | None) -> None:
    """Let the model's passes split their micro-batches over `ranks`.

    Raises:
        ModelError: the model has fewer attention heads than there are ranks.
    """
    if ranks is not None:
        config: Any = model.config
        heads = config.get_text_config().num_attention_heads
        deal_heads(heads, heads, ranks.size)
    setattr(model, "fastrl_sequence", ranks)  # noqa: B010
