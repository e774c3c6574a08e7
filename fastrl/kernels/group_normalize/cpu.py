"""Group-relative scores on a CPU: scatter sums straight into the places that the ids name, where these lie close."""

from __future__ import annotations

import math

import torch

from ..dispatch import accumulate_dtype
from .reference import RELATIVE_RANGE, group_normalize_reference

SPARSE = 4  # places that ids may spread over, for each sample; beyond, they are sorted


def _places(group_id: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(group [S] int64, number of groups, some of which may be empty)."""
    low, high = (int(x) for x in group_id.aminmax())
    count = high - low + 1
    if count > SPARSE * group_id.shape[0]:
        distinct, group = torch.unique(group_id, return_inverse=True)
        return group, distinct.shape[0]
    group = group_id if group_id.dtype == torch.int64 else group_id.long()
    return (group - low if low else group), count


def group_normalize_cpu(
    scores: torch.Tensor,
    group_id: torch.Tensor,
    valid: torch.Tensor | None,
    scale_std: bool,
    leave_one_out: bool,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    """Same arguments and results as `group_normalize_reference`."""
    arguments = (scores, group_id, valid, scale_std, leave_one_out, ddof, eps)
    if not scores.numel():
        return group_normalize_reference(*arguments)
    group, groups = _places(group_id)
    s = scores.to(accumulate_dtype(scores))
    counts = inside = None
    if valid is not None:
        inside = valid.bool()
        counts = inside.to(s.dtype)
        s = torch.where(inside, s, 0.0)

    def total(x: torch.Tensor) -> torch.Tensor:
        return s.new_zeros(groups).scatter_add_(0, group, x)

    def extreme(x: torch.Tensor, start: float, reduce: str) -> torch.Tensor:
        return s.new_full((groups,), start).scatter_reduce_(0, group, x, reduce)

    n = total(torch.ones_like(s) if counts is None else counts)
    size = n.clamp(min=1)
    deviation = s - (total(s) / size).index_select(0, group)
    low = high = s
    if counts is not None and inside is not None:
        deviation.mul_(counts)
        low, high = (torch.where(inside, s, end) for end in (math.inf, -math.inf))
    top, bottom = extreme(high, -math.inf, "amax"), extreme(low, math.inf, "amin")
    largest = torch.maximum(top, bottom.neg()).clamp_(min=1)  # of |s|
    # a group of one has no range either; "not above" would let a NaN through, but that goes to the reference
    flat = top.sub_(bottom) <= largest.mul_(RELATIVE_RANGE)
    if scale_std:
        variance = total(deviation * deviation).div_((n - ddof).clamp_(min=1))
        divisor = variance.sqrt_().add_(eps)
    else:
        divisor = torch.ones_like(n)
    if leave_one_out:
        deviation.mul_((n / (n - 1).clamp_(min=1)).index_select(0, group))
    deviation.div_(divisor.masked_fill_(flat, math.inf).index_select(0, group))
    return deviation if math.isfinite(float(deviation.sum())) else group_normalize_reference(*arguments)
