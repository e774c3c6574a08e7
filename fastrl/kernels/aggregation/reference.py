"""Aggregation in plain torch: per-sequence scales, and the one masked, scaled sum."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..ragged import bool_mask, offsets_of, segment_ids, segment_sum

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "prompt-mean",
)


def inverse(x: torch.Tensor) -> torch.Tensor:
    """1 / x, and 0 where x is 0."""
    return torch.where(x > 0, x.reciprocal(), 0.0)


def sequence_lengths_reference(
    like: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Tokens inside the mask of each sequence, int64 [S]."""
    check_cu_seqlens_values("aggregate", cu_seqlens, like.numel())
    if mask is None:
        offsets = offsets_of(like, cu_seqlens)
        return offsets[1:] - offsets[:-1]
    if cu_seqlens is None:
        return (mask != 0).sum(1)
    return segment_sum(bool_mask(mask, like).to(torch.int64), offsets_of(like, cu_seqlens))


def aggregation_scale_reference(
    lengths: torch.Tensor,
    group_id: torch.Tensor | None,
    count: torch.Tensor | None,
    mode: str,
    factor: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The table of `fastrl.kernels.aggregation_scale`."""
    tokens = lengths.to(dtype)
    if mode == "token-sum":
        return torch.ones_like(tokens)
    given = None if count is None else count.to(dtype)
    if mode == "token-mean":
        total = tokens.sum() if given is None else given
        return inverse(total).expand(tokens.shape).clone()
    if mode == "prompt-mean":
        assert group_id is not None
        distinct, group = torch.unique(group_id, return_inverse=True)
        per_group = tokens.new_zeros(distinct.shape[0]).index_add(0, group, tokens)
        prompts = (per_group > 0).sum().to(dtype) if given is None else given
        return inverse(prompts) * inverse(per_group)[group]
    sequences = (tokens > 0).sum().to(dtype) if given is None else given
    scale = inverse(sequences).expand(tokens.shape)
    if mode == "seq-mean-token-mean":
        return scale * inverse(tokens)
    return (scale / factor).clone()


def token_scale(scale: torch.Tensor, like: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """`scale` [S] (or one value for all) spread over the flat tokens, [T] (or [1])."""
    if scale.numel() == 1:
        return scale.reshape(1)
    if cu_seqlens is None:
        return scale[:, None].expand(like.shape).reshape(-1)
    return scale[segment_ids(offsets_of(like, cu_seqlens), like.numel())]


def aggregate_reference(
    token_loss: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """sum_s scale_s sum_t m w l as a scalar; differentiable in token_loss."""
    check_cu_seqlens_values("aggregate", cu_seqlens, token_loss.numel())
    dtype = accumulate_dtype(token_loss)
    factor = aggregate_gradient(token_loss, mask, weights, scale, cu_seqlens)
    flat = token_loss.reshape(-1).to(dtype)
    inside = bool_mask(mask, token_loss)
    return (torch.where(inside, flat, torch.zeros_like(flat)) * factor.reshape(-1)).sum()


def aggregate_gradient(
    like: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """d aggregate / d token_loss: m w scale, shaped like the tokens."""
    dtype = accumulate_dtype(like)
    factor = token_scale(scale.to(dtype), like, cu_seqlens).expand(like.numel())
    if weights is not None:
        factor = factor * weights.reshape(-1).to(dtype)
    inside = bool_mask(mask, like)
    return torch.where(inside, factor, torch.zeros_like(factor)).reshape(like.shape)
