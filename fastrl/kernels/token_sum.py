"""Triton functions of the kernels that turn token losses into one number: scales of tokens, and the final sum."""

import triton
import triton.language as tl

from .device import sequence_of

# how a token finds its scale (constexpr SCALE of the kernels)
SCALE_NONE, SCALE_ONE, SCALE_ROWS, SCALE_RAGGED = 0, 1, 2, 3


@triton.jit
def token_scale(scale, cu_seqlens, t, total, row_length, sequences, steps, SCALE: tl.constexpr, FULL: tl.constexpr):
    """The factor of each token: 1, one value for all, or its sequence's."""
    if SCALE == 0:
        factor = (t * 0).to(tl.float32) + 1.0
    elif SCALE == 1:
        factor = (t * 0).to(tl.float32) + tl.load(scale).to(tl.float32)
    else:
        # lanes past the end look at the last token, whose place exists
        token = t
        if not FULL:
            token = tl.minimum(t, total - 1)
        if SCALE == 2:
            place = token // row_length
        else:
            place = sequence_of(cu_seqlens, token, sequences, steps)
        factor = tl.load(scale + place).to(tl.float32)
    return factor


@triton.jit
def column_sum(partials, column, programs, BLOCK: tl.constexpr):
    """Sum over programs of one column of partials [columns, programs], in a fixed order."""
    lane = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for at in range(0, programs, BLOCK):
        i = at + lane
        acc += tl.load(partials + column * programs + i, mask=i < programs, other=0.0)
    return tl.sum(acc, axis=0)


@triton.jit
def column_max(partials, column, programs, BLOCK: tl.constexpr):
    """Maximum over programs of one non-negative column."""
    lane = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for at in range(0, programs, BLOCK):
        i = at + lane
        acc = tl.maximum(acc, tl.load(partials + column * programs + i, mask=i < programs, other=0.0))
    return tl.max(acc, axis=0)
