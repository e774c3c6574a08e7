"""The one division: loss = sum_i scale_i sum_t m l_t, with scale [S] from counts of the whole optimizer batch.

`aggregation_scale(mode, lengths, ...)` and `aggregate(token_loss, mask, scale=..., ...)` are the kernels; this file
reduces the counts that a mode reads over ranks, before the batch is split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.algorithms.groups import group_sum
from fastrl.algorithms.ragged import sequence_count
from fastrl.kernels import aggregate, aggregation_scale

__all__ = ["MODES", "aggregate", "aggregation_scale", "scale_of_batch"]

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "prompt-mean",
)


def scale_of_batch(
    loss_agg_mode: str,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    group_id: Tensor,
    *,
    loss_scale_factor: float | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    group_tokens: Tensor | None = None,
) -> Tensor:
    """Scale of every sequence of this rank's part of one optimizer batch, from counts over all ranks.

    Args:
        loss_mask: [T] bool, after every filter and rejection.
        cu_seqlens: [S+1]; group_id: [S].
        loss_scale_factor: constant divisor of seq-mean-token-sum-norm, in tokens.
        reduce: sums a tensor over ranks; None when there is one.
        group_tokens: [S] trained tokens of each sequence's group over all ranks; None when groups are whole here.

    Returns:
        scale [S] float64; 0 for a sequence without trained tokens.
    """
    lengths = sequence_count(loss_mask, cu_seqlens)
    here = torch.stack([lengths.sum(), (lengths > 0).sum(), (lengths > 0).sum()]).double()
    if loss_agg_mode != "prompt-mean":
        totals = here if reduce is None else reduce(here)
        return aggregation_scale(
            loss_agg_mode,
            lengths,
            num_tokens=totals[0],
            num_sequences=totals[1],
            loss_scale_factor=loss_scale_factor,
        ).double()
    return prompt_mean_scale(lengths, group_id, reduce=reduce, group_tokens=group_tokens)


def prompt_mean_scale(
    lengths: Tensor,
    group_id: Tensor,
    *,
    reduce: Callable[[Tensor], Tensor] | None = None,
    group_tokens: Tensor | None = None,
) -> Tensor:
    """scale_i = 1 / (N_prompt x tokens of the group), N_prompt = groups with a trained token on any rank.

    A group that several ranks share is counted in parts: each rank adds (its tokens / the group's tokens).
    """
    ids, index = torch.unique(group_id, return_inverse=True)
    here = group_sum(lengths, index, ids.numel())
    tokens = here if group_tokens is None else group_tokens.double()
    part = torch.where(tokens > 0, lengths.double() / tokens.clamp(min=1), 0.0).sum().reshape(1)
    num_prompts = part if reduce is None else reduce(part)
    trained = (lengths > 0) & (tokens > 0)
    return torch.where(trained, 1.0 / (num_prompts.clamp(min=1e-300) * tokens.clamp(min=1)), 0.0)
