"""Masked statistics on a CPU, in blocks: two passes for sum, range and variance, a third where the sign is one.

A factor turns what does not count into 0, which widens the range only where all values have one sign. Then the end of
the range that is known, a value itself, takes the zeros' place for the other end.
"""

from __future__ import annotations

import torch

from ..cpu_blocks import blocks, buffers, factor, flat_bytes, is_finite, times
from ..dispatch import accumulate_dtype
from .reference import masked_stats_reference

Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def masked_stats_cpu(
    x: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, per_sequence: bool, ddof: int
) -> Stats:
    """Same arguments and results as `masked_stats_reference`."""
    if per_sequence or cu_seqlens is not None or not x.numel():
        return masked_stats_reference(x, mask, cu_seqlens, per_sequence, ddof)
    dtype, total = accumulate_dtype(x), x.numel()
    flat, marks = x.reshape(-1), flat_bytes(mask)
    first, second = buffers(2, total, dtype)
    summed = count = 0.0
    low, high = float("inf"), float("-inf")
    for part in blocks(total):
        inside = factor(marks, part, first)
        values = times(flat[part], inside, second[: part.stop - part.start])
        summed += float(values.sum())
        count += part.stop - part.start if inside is None else float(inside.sum())
        ends = [float(end) for end in values.aminmax()]
        low, high = min(low, ends[0]), max(high, ends[1])
    if not count or not is_finite(summed):
        return masked_stats_reference(x, mask, cu_seqlens, per_sequence, ddof)
    mean = summed / count
    filled = count < total and (low == 0) != (high == 0)
    known = low if high == 0 else high
    other = known
    squares = 0.0
    for part in blocks(total):
        inside = factor(marks, part, first)
        values = times(flat[part], inside, second[: part.stop - part.start])
        if filled and inside is not None:
            # known x (1 - inside) in the zeros' place
            values.add_(inside.sub_(1), alpha=-known)
            other = max(other, float(values.amax())) if high == 0 else min(other, float(values.amin()))
            inside.add_(1)
        deviation = values.sub_(mean)
        if inside is not None:
            deviation.mul_(inside)
        squares += float(deviation.mul_(deviation).sum())
    if filled:
        low, high = (known, other) if high == 0 else (other, known)
    numbers = (summed, mean, squares / max(count - ddof, 1), low, high)
    total_, mean_, var, smallest, largest = (torch.full((), n, dtype=dtype, device=x.device) for n in numbers)
    return total_, torch.full((), int(count), dtype=torch.int64, device=x.device), mean_, var, smallest, largest
