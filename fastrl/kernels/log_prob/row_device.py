"""Triton functions of a row of logits: score and weight of tiles, online sums, the gradient of a tile.

A tile is [DEPTH, WIDTH] columns of one row. Each thread keeps a running maximum per DEPTH values that it loads, so that
the loop needs no exchange between threads and 1 + 1 / DEPTH exponentials a value. With a maximum of the block there
would be a reduction in every turn, and with one per value 2 exponentials: at full bandwidth, more than a card's special
function units can do.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))


@triton.jit
def tile_columns(start, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Column numbers [DEPTH, WIDTH] of the tile that starts at a column."""
    return start + tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def column_offsets(columns, stride, STRIDED: tl.constexpr):
    """Offsets of columns in a row; 64 bits where the columns are not neighbours (their stride may be a whole batch)."""
    if STRIDED:
        offsets = columns.to(tl.int64) * stride
    else:
        offsets = columns
    return offsets


@triton.jit
def columns_to_grid(row):
    """Columns between the start of a row and the next multiple of 16 bytes."""
    size: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    return (((16 - row.to(tl.int64) % 16) % 16) // size).to(tl.int32)


@triton.jit
def load_scores(
    row, columns, stride, vocabulary, inner, FULL: tl.constexpr, STRIDED: tl.constexpr, CAPPED: tl.constexpr
):
    """f of the tile in float32: the logits, or their tanh(inner u); -inf behind the vocabulary."""
    place = row + column_offsets(columns, stride, STRIDED)
    if FULL:
        f = tl.load(place).to(tl.float32)
    else:
        f = tl.load(place, mask=columns < vocabulary, other=NEVER).to(tl.float32)
    if CAPPED:
        f = tanh(inner * f)
        if not FULL:
            f = tl.where(columns < vocabulary, f, NEVER)
    return f


@triton.jit
def tanh(x):
    """Hyperbolic tangent by one exponential; NaN stays NaN."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    y = (1 - e) / (1 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def add_tile(f, scale, top, total, weighted, squares, ENTROPY: tl.constexpr, SQUARES: tl.constexpr):
    """Online sums [1, WIDTH] with a tile added: maximum of f, sums of e = 2^t, e t and e^2; t = scale (f - top)."""
    high = tl.maximum(top, tl.max(f, axis=0, keep_dims=True))
    # a thread that has seen -inf only has sums of 0: any finite base will do
    base = tl.where(high == NEVER, 0.0, high)
    t = (f - base) * scale
    e = tl.exp2(t)
    drop = tl.where(top == NEVER, 0.0, (top - base) * scale)
    shrink = tl.exp2(drop)
    if ENTROPY:
        finite = tl.maximum(t, -1.0e4)  # 0 log 0 = 0
        weighted = shrink * (weighted + drop * total) + tl.sum(e * finite, axis=0, keep_dims=True)
    if SQUARES:
        squares = shrink * shrink * squares + tl.sum(e * e, axis=0, keep_dims=True)
    total = shrink * total + tl.sum(e, axis=0, keep_dims=True)
    return high, total, weighted, squares


@triton.jit
def merge_threads(scale, top, total, weighted, squares, ENTROPY: tl.constexpr, SQUARES: tl.constexpr):
    """The sums of the whole row from those of its threads, scalars."""
    high = tl.max(tl.max(top, axis=1), axis=0)
    base = tl.where(high == NEVER, 0.0, high)
    drop = tl.where(top == NEVER, 0.0, (top - base) * scale)
    shrink = tl.exp2(drop)
    if ENTROPY:
        weighted = tl.sum(tl.sum(shrink * (weighted + drop * total), axis=1), axis=0)
    else:
        weighted = 0.0
    if SQUARES:
        squares = tl.sum(tl.sum(shrink * shrink * squares, axis=1), axis=0)
    else:
        squares = 0.0
    total = tl.sum(tl.sum(shrink * total, axis=1), axis=0)
    return high, total, weighted, squares


@triton.jit
def gradient_tile(
    f, columns, label, scale, high, constant, linear, at_label, CAPPED: tl.constexpr, ENTROPY: tl.constexpr
):
    """d logits of a tile: 2^t (linear t + constant), + at_label at the label; times 1 - f^2 under a softcap."""
    t = (f - high) * scale
    d = tl.exp2(t)
    if ENTROPY:
        d = d * (linear * tl.maximum(t, -1.0e4) + constant)
    else:
        d = d * constant
    d = tl.where(columns == label, d + at_label, d)
    if CAPPED:
        d = d * (1 - f * f)
    return d
