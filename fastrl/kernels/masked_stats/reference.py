"""Masked statistics in plain torch, overall or per sequence."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..ragged import bool_mask, offsets_of, segment_ids


def masked_stats_reference(
    x: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, per_sequence: bool, ddof: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum, count, mean, var, min, max); differentiable in x."""
    check_cu_seqlens_values("masked_stats", cu_seqlens, x.numel())
    dtype = accumulate_dtype(x)
    zero = torch.zeros((), dtype=dtype, device=x.device)
    inside = bool_mask(mask, x)
    flat = torch.where(inside, x.reshape(-1).to(dtype), zero)
    low = flat.masked_fill(~inside, torch.inf)
    high = flat.masked_fill(~inside, -torch.inf)
    if per_sequence:
        offsets = offsets_of(x, cu_seqlens)
        segments, sequences = segment_ids(offsets, flat.shape[0]), offsets.shape[0] - 1
        empty = flat.new_zeros(sequences)
        count = torch.zeros(sequences, dtype=torch.int64, device=x.device).index_add(
            0, segments, inside.to(torch.int64)
        )
        total = empty.index_add(0, segments, flat)
        mean = total / count.clamp(min=1)
        deviation = torch.where(inside, flat - mean[segments], zero)
        squares = empty.index_add(0, segments, deviation * deviation)
        smallest = torch.full_like(empty, torch.inf).scatter_reduce(0, segments, low, "amin")
        largest = torch.full_like(empty, -torch.inf).scatter_reduce(0, segments, high, "amax")
    else:
        count = inside.sum()
        total = flat.sum()
        mean = total / count.clamp(min=1)
        deviation = torch.where(inside, flat - mean, zero)
        squares = (deviation * deviation).sum()
        end = zero.reshape(1)
        smallest = torch.cat([low, end + torch.inf]).amin()
        largest = torch.cat([high, end - torch.inf]).amax()
    return total, count, mean, squares / (count - ddof).clamp(min=1), smallest, largest
