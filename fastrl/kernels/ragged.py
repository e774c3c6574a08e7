"""The two layouts as one: padded [B, T] is ragged with offsets 0, T, 2T, ...; used by every reference."""

from __future__ import annotations

import torch


def offsets_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """int64 offsets [S+1] of the sequences in `x.reshape(-1)`: the given ones, or the rows of a padded [B, T]."""
    if cu_seqlens is not None:
        return cu_seqlens.to(torch.int64)
    rows, length = x.shape
    return torch.arange(rows + 1, device=x.device, dtype=torch.int64) * length


def segment_ids(offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Sequence number [T] of each token: 0 0 0 1 1 for offsets 0 3 5."""
    lengths = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=offsets.device), lengths, output_size=total)


def segment_sum(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums [S] of the sequences of flat `x` [T]; empty sequences give 0."""
    out = x.new_zeros(offsets.shape[0] - 1)
    return out.index_add(0, segment_ids(offsets, x.shape[0]), x)


def bool_mask(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The mask as flat bool [numel]; all true when absent."""
    if mask is None:
        return torch.ones(like.numel(), dtype=torch.bool, device=like.device)
    return (mask if mask.dtype == torch.bool else mask != 0).reshape(-1)
