"""Aggregation on a CPU: rows are summed first and scaled then; a mask is a factor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..checks import check_cu_seqlens_values
from ..cpu_blocks import as_bytes, block_size, blocks, flat_bytes, times
from ..dispatch import accumulate_dtype
from .reference import aggregate_gradient, aggregate_reference, sequence_lengths_reference

EXACT = 1 << 24  # ones that float32 can count


def sequence_lengths_cpu(
    like: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Same arguments and results as `sequence_lengths_reference`."""
    if mask is None or like.numel() == 0 or like.shape[-1] > EXACT:
        return sequence_lengths_reference(like, mask, cu_seqlens)
    check_cu_seqlens_values("aggregate", cu_seqlens, like.numel())
    if cu_seqlens is None:
        marks, (rows, length) = as_bytes(mask), like.shape
        step = max(1, block_size() // length)
        buffer = torch.empty((min(step, rows), length), dtype=torch.float32, device=like.device)
        found = torch.empty(rows, dtype=torch.float32, device=like.device)
        for part in blocks(rows, step):
            torch.sum(buffer[: part.stop - part.start].copy_(marks[part]), 1, out=found[part])
        return found.long()
    running = torch.nn.functional.pad(as_bytes(mask).cumsum(0), (1, 0))
    ends = running.index_select(0, cu_seqlens.long())
    return ends[1:] - ends[:-1]


class _Layout(NamedTuple):
    """Rows of equal length with a scale each, or one row with a scale for all or for each token."""

    rows: int
    length: int
    scale: torch.Tensor  # [rows, 1] or [1, T]

    @staticmethod
    def of(x: torch.Tensor, scale: torch.Tensor, cu_seqlens: torch.Tensor | None) -> _Layout:
        scale = scale.to(accumulate_dtype(x))
        if scale.numel() == 1:
            return _Layout(1, x.numel(), scale.reshape(1, 1))
        if cu_seqlens is None:
            return _Layout(x.shape[0], x.shape[1], scale[:, None])
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        return _Layout(1, x.numel(), torch.repeat_interleave(scale, lengths, output_size=x.numel())[None])


def aggregate_cpu(
    token_loss: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Same arguments and values as `aggregate_reference`; not differentiable."""
    if not token_loss.numel():
        return aggregate_reference(token_loss, mask, weights, scale, cu_seqlens)
    check_cu_seqlens_values("aggregate", cu_seqlens, token_loss.numel())
    rows, length, factor = _Layout.of(token_loss, scale, cu_seqlens)
    flat, marks = token_loss.reshape(-1), flat_bytes(mask)
    step = max(1, block_size() // length) * length if rows > 1 else block_size()
    buffer, inside = torch.empty((2, min(step, flat.shape[0])), dtype=factor.dtype, device=flat.device).unbind(0)
    total = 0.0
    for part in blocks(flat.shape[0], step):
        n = part.stop - part.start
        m = None if marks is None else inside[:n].copy_(marks[part])
        x = times(flat[part], m, buffer[:n])
        if weights is not None:
            x.mul_(weights.reshape(-1)[part])
        if factor.shape[1] > 1:
            x.mul_(factor[0, part])
        if rows > 1:
            first = part.start // length
            total += float(torch.dot(x.view(-1, length).sum(1), factor[first : first + n // length, 0]))
        else:
            total += float(x.sum())
    if factor.numel() == 1:
        total *= float(factor)
    if not math.isfinite(total):
        return aggregate_reference(token_loss, mask, weights, scale, cu_seqlens)
    return torch.full((), total, dtype=factor.dtype, device=flat.device)


def aggregate_backward_cpu(
    upstream: torch.Tensor,
    token_loss: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """m w scale upstream, shaped like the token losses and in their dtype."""
    rows, length, factor = _Layout.of(token_loss, scale, cu_seqlens)
    factor = factor * upstream
    out = factor.new_empty((rows, length))
    if mask is None:
        out.copy_(factor.expand(rows, length))
    else:
        out.copy_(as_bytes(mask).reshape(rows, length)).mul_(factor)
    if weights is not None:
        out.mul_(weights.reshape(rows, length))
    if not math.isfinite(float(out.sum())):
        out = aggregate_gradient(token_loss, mask, weights, scale, cu_seqlens) * upstream
    return out.to(token_loss.dtype).view(token_loss.shape)
