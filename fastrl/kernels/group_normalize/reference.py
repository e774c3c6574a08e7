"""Group-relative scores in plain torch: sort-based grouping and scatter sums, no loop over groups."""

from __future__ import annotations

import torch

from ..dispatch import accumulate_dtype

# a group whose scores spread less than this, relative to max(1, largest |score|), has no signal
RELATIVE_RANGE = 1e-6


def group_normalize_reference(
    scores: torch.Tensor,
    group_id: torch.Tensor,
    valid: torch.Tensor | None,
    scale_std: bool,
    leave_one_out: bool,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    """The equation of `fastrl.kernels.group_normalize`; differentiable in scores."""
    dtype = accumulate_dtype(scores)
    zero = torch.zeros((), dtype=dtype, device=scores.device)
    if scores.numel() == 0:
        return scores.new_zeros(scores.shape, dtype=dtype)
    counts = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid != 0
    s = torch.where(counts, scores.to(dtype), zero)
    distinct, group = torch.unique(group_id, return_inverse=True)
    empty = s.new_zeros(distinct.shape[0])
    n = empty.index_add(0, group, counts.to(dtype))
    mean = empty.index_add(0, group, s) / n.clamp(min=1)
    deviation = torch.where(counts, s - mean[group], zero)
    top = empty.scatter_reduce(0, group, s.masked_fill(~counts, -torch.inf), "amax", include_self=False)
    bottom = empty.scatter_reduce(0, group, s.masked_fill(~counts, torch.inf), "amin", include_self=False)
    size = torch.maximum(top.abs(), bottom.abs()).clamp(min=1)
    # "not above" also keeps a group with a non-finite score out of the silent zero: NaN compares false
    flat = (top - bottom <= RELATIVE_RANGE * size) | (n <= 1)
    out = deviation
    if leave_one_out:
        out = out * (n / (n - 1).clamp(min=1))[group]
    if scale_std:
        variance = empty.index_add(0, group, deviation * deviation) / (n - ddof).clamp(min=1)
        safe = torch.where(flat, torch.ones_like(variance), variance)
        out = out / (safe.sqrt() + eps)[group]
    return torch.where(counts & ~flat[group], out, zero)
