"""Triton functions that several kernels share: row bounds, block loads, scans, arithmetic that keeps NaN."""

import triton
import triton.language as tl


@triton.jit
def row_bounds(cu_seqlens, row, row_length, total, RAGGED: tl.constexpr):
    """First and one-past-last token (int64) of a row, never outside [0, total] whatever the offsets hold."""
    if RAGGED:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        end = tl.load(cu_seqlens + row + 1).to(tl.int64)
    else:
        start = row.to(tl.int64) * row_length
        end = start + row_length
    limit = total + start * 0
    return tl.minimum(tl.maximum(start, 0), limit), tl.minimum(tl.maximum(end, 0), limit)


@triton.jit
def load_block(pointer, offsets, total, FULL: tl.constexpr):
    """Values at the offsets; with FULL all are below total and the loads stay unmasked, hence wide."""
    if FULL:
        x = tl.load(pointer + offsets)
    else:
        x = tl.load(pointer + offsets, mask=offsets < total, other=0)
    return x


@triton.jit
def load_float(pointer, offsets, total, FULL: tl.constexpr):
    return load_block(pointer, offsets, total, FULL).to(tl.float32)


@triton.jit
def trained_tokens(mask, offsets, start, end, total, HAS_MASK: tl.constexpr, FULL: tl.constexpr):
    """True at tokens of [start, end) inside the mask."""
    inside = (offsets >= start) & (offsets < end)
    if HAS_MASK:
        inside = inside & (load_block(mask, offsets, total, FULL) != 0)
    return inside


@triton.jit
def clip(x, low, high):
    """x held inside [low, high]; NaN stays NaN (tl.minimum would drop it)."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def exp_minus_1_minus(x):
    """e^x - 1 - x without losing the digits near 0."""
    series = x * x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334)))
    return tl.where((x < 0.1) & (x > -0.1), series, tl.exp(x) - 1 - x)


@triton.jit
def sequence_of(cu_seqlens, offsets, sequences, steps):
    """Sequence number of each token by bisection: the largest s with cu_seqlens[s] <= t (below `sequences`)."""
    low = offsets * 0
    high = low + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        start = tl.load(cu_seqlens + middle).to(tl.int64)
        right = start <= offsets
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def is_last_to_arrive(counter, programs):
    """Count this program; True in the last one, which then sees what the others stored and has reset the counter."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1)
    last = before == programs - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last
