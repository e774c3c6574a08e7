"""Sums, means and positions over ragged data: T tokens of S sequences, borders cu_seqlens [S+1].

Sums are accumulated in float64, so that they do not depend on how sequences were packed, and given back in the type
of the input. Masked positions are replaced before anything is computed, so NaN there changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """For each token the sequence it belongs to: [T] int64."""
    return torch.repeat_interleave(cu_seqlens.diff().long(), output_size=num_tokens)


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x where mask is True, 0 elsewhere; the gradient at masked positions is exactly 0."""
    return x if mask is None else torch.where(mask.bool(), x, torch.zeros_like(x))


def sequence_sum(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """sum_t m x of each sequence: [T] -> [S]."""
    index = sequence_index(cu_seqlens, x.numel())
    total = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=x.device)
    return total.index_add(0, index, zero_masked(x, mask).double()).to(x.dtype)


def sequence_count(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """L, the number of unmasked tokens of each sequence: [T] bool -> [S] int64."""
    index = sequence_index(cu_seqlens, mask.numel())
    return torch.zeros(cu_seqlens.numel() - 1, dtype=torch.int64, device=mask.device).index_add(0, index, mask.long())


def sequence_mean(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """sum_t m x / max(L, 1) of each sequence: [T] -> [S]; 0 for a fully masked one."""
    return sequence_sum(x, mask, cu_seqlens) / sequence_count(mask, cu_seqlens).clamp(min=1)


def sequence_max(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Largest unmasked value of each sequence: [T] -> [S]; -inf for a fully masked one."""
    low = torch.full_like(x, -torch.inf)
    out = torch.full((cu_seqlens.numel() - 1,), -torch.inf, dtype=x.dtype, device=x.device)
    return out.scatter_reduce(0, sequence_index(cu_seqlens, x.numel()), torch.where(mask.bool(), x, low), "amax")


def spread(per_sequence: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """A value per sequence repeated over its tokens: [S] -> [T]."""
    return per_sequence[sequence_index(cu_seqlens, num_tokens)]


def cumulative_sum(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """sum_{u <= t} m x inside each sequence: [T] -> [T], accumulated in float64."""
    total = zero_masked(x, mask).double().cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[cu_seqlens[:-1]]
    return (total - spread(before, cu_seqlens, x.numel())).to(x.dtype)


def trained_position(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many unmasked tokens of its sequence come before each token: [T] int64."""
    total = mask.long().cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[cu_seqlens[:-1]]
    return total - mask.long() - spread(before, cu_seqlens, mask.numel())


def last_unmasked(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Flat index of the last unmasked token of each sequence: [S] int64, -1 where there is none."""
    flat = torch.where(mask.bool(), torch.arange(mask.numel(), device=mask.device), -1)
    out = torch.full((cu_seqlens.numel() - 1,), -1, dtype=torch.int64, device=mask.device)
    return out.scatter_reduce(0, sequence_index(cu_seqlens, mask.numel()), flat, "amax")
