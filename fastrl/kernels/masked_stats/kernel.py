"""Masked statistics in Triton: one program a sequence (or a stretch of tokens), merged by Chan's formula.

Every block is two-pass in registers (mean, then squared deviations), so nothing is lost to a large mean.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import launch
from ..checks import check_cu_seqlens_values
from ..device import load_float, row_bounds, trained_tokens
from ..dispatch import on_device_of
from ..rows import flat, flat_mask, row_length


@triton.jit
def _block_stats(x, mask, at, start, end, total, HAS_MASK: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """(count, sum, mean, squared deviations, min, max, non-numbers) of one block."""
    t = at + tl.arange(0, BLOCK)
    inside = trained_tokens(mask, t, start, end, total, HAS_MASK, FULL)
    value = load_float(x, t, total, FULL)
    kept = tl.where(inside, value, 0.0)
    count = tl.sum(inside.to(tl.float32), axis=0)
    block_sum = tl.sum(kept, axis=0)
    mean = block_sum / tl.maximum(count, 1.0)
    deviation = tl.where(inside, value - mean, 0.0)
    squares = tl.sum(deviation * deviation, axis=0)
    low = tl.min(tl.where(inside, value, float("inf")), axis=0)
    high = tl.max(tl.where(inside, value, float("-inf")), axis=0)
    bad = tl.sum((kept != kept).to(tl.float32), axis=0)
    return count, block_sum, mean, squares, low, high, bad


@triton.jit(do_not_specialize=["row_length", "total", "rows", "ddof"])
def stats_rows_kernel(
    x, mask, columns, cu_seqlens, row_length, total, rows, ddof,
    HAS_MASK: tl.constexpr, RAGGED: tl.constexpr, VARIANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """columns [6, rows]: count, sum, mean, variance (or the sum of squared deviations), min, max of each row."""
    row = tl.program_id(0)
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    first = start // BLOCK
    blocks = tl.where(end > start, (end - 1) // BLOCK - first + 1, 0)
    count, sums, mean, squares, bad = 0.0, 0.0, 0.0, 0.0, 0.0
    low, high = float("inf"), float("-inf")
    for i in range(blocks):
        at = (first + i) * BLOCK
        if at + BLOCK <= total:
            n, s, m, q, lo, hi, nan = _block_stats(x, mask, at, start, end, total, HAS_MASK, True, BLOCK)
        else:
            n, s, m, q, lo, hi, nan = _block_stats(x, mask, at, start, end, total, HAS_MASK, False, BLOCK)
        both = tl.maximum(count + n, 1.0)
        shift = m - mean
        # an empty side has mean 0 by convention and must not pull
        squares += q + shift * shift * (count * n / both)
        mean += shift * (n / both)
        count += n
        sums += s
        low = tl.minimum(low, lo)
        high = tl.maximum(high, hi)
        bad += nan
    if VARIANCE:
        squares = squares / tl.maximum(count - ddof, 1.0)
    if bad > 0:
        low = float("nan")
        high = float("nan")
    place = columns + row
    tl.store(place, count)
    tl.store(place + rows, sums)
    tl.store(place + 2 * rows, mean)
    tl.store(place + 3 * rows, squares)
    tl.store(place + 4 * rows, low)
    tl.store(place + 5 * rows, high)


@triton.jit(do_not_specialize=["rows", "ddof"])
def stats_merge_kernel(columns, out, count_out, rows, ddof, BLOCK: tl.constexpr):
    """out [5]: sum, mean, variance, min, max of all rows; count_out int64. One program."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int64)
    sums = tl.zeros([BLOCK], tl.float32)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.float32)
    for at in range(0, rows, BLOCK):
        row = at + lane
        some = row < rows
        count += tl.load(columns + row, mask=some, other=0.0).to(tl.int64)
        sums += tl.load(columns + rows + row, mask=some, other=0.0)
        least = tl.load(columns + 4 * rows + row, mask=some, other=float("inf"))
        low = tl.minimum(low, least)
        high = tl.maximum(high, tl.load(columns + 5 * rows + row, mask=some, other=float("-inf")))
        bad += (least != least).to(tl.float32)
    n = tl.sum(count, axis=0)
    whole = tl.sum(sums, axis=0)
    mean = whole / tl.maximum(n, 1).to(tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for at in range(0, rows, BLOCK):
        row = at + lane
        some = row < rows
        weight = tl.load(columns + row, mask=some, other=0.0)
        shift = tl.load(columns + 2 * rows + row, mask=some, other=0.0) - mean
        squares += tl.load(columns + 3 * rows + row, mask=some, other=0.0)
        squares += tl.where(weight > 0, weight * shift * shift, 0.0)
    variance = tl.sum(squares, axis=0) / tl.maximum(n - ddof, 1).to(tl.float32)
    smallest = tl.min(low, axis=0)
    largest = tl.max(high, axis=0)
    if tl.sum(bad, axis=0) > 0:
        smallest = float("nan")
        largest = float("nan")
    tl.store(out, whole)
    tl.store(out + 1, mean)
    tl.store(out + 2, variance)
    tl.store(out + 3, smallest)
    tl.store(out + 4, largest)
    tl.store(count_out, n)


def launch_rows(
    x: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, rows: int, length: int, **flags: Any
) -> torch.Tensor:
    """columns [6, rows] of `stats_rows_kernel`."""
    config = launch.config("stats_rows", x, x.numel() // max(rows, 1))
    config.pop("STRETCH")
    columns = torch.empty(6, rows, dtype=torch.float32, device=x.device)
    offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
    stats_rows_kernel[(rows,)](
        flat(x), flat_mask(mask), columns, offsets, length, x.numel(), rows, flags.pop("ddof"),
        HAS_MASK=mask is not None, RAGGED=offsets is not None, **flags, **config,
    )  # fmt: skip
    return columns


def overall_stats(x: torch.Tensor, mask: torch.Tensor | None, ddof: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [5], count []) of `stats_merge_kernel`: stretches of tokens, then their merge."""
    stretch = launch.config("stats_rows", x, 1 << 30)["STRETCH"]
    rows = triton.cdiv(x.numel(), stretch)
    out = torch.empty(5, dtype=torch.float32, device=x.device)
    count = torch.empty((), dtype=torch.int64, device=x.device)
    with on_device_of(x):
        if rows:
            columns = launch_rows(x, mask, None, rows, stretch, ddof=ddof, VARIANCE=False)
        else:
            columns = out
        stats_merge_kernel[(1,)](columns, out, count, rows, ddof, **launch.config("stats_merge", x, rows))
    return out, count


def masked_stats_triton(
    x: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, per_sequence: bool, ddof: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same arguments and results as `masked_stats_reference`."""
    check_cu_seqlens_values("masked_stats", cu_seqlens, x.numel())
    if not per_sequence:
        out, count = overall_stats(x, mask, ddof)
        total, mean, var, low, high = (v.clone() for v in out.unbind(0))
        return total, count, mean, var, low, high
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if rows == 0:
        total, mean, var, low, high = (x.new_empty(0, dtype=torch.float32) for _ in range(5))
        return total, x.new_empty(0, dtype=torch.int64), mean, var, low, high
    with on_device_of(x):
        columns = launch_rows(x, mask, cu_seqlens, rows, row_length(x, cu_seqlens), ddof=ddof, VARIANCE=True)
    count, total, mean, var, low, high = (v.clone() for v in columns.unbind(0))
    return total, count.to(torch.int64), mean, var, low, high
