"""Group-relative scores in Triton: every sample compares its id with all others, two passes, no atomics.

Ids may be anything in any order, so nothing is sorted. A first launch writes the smallest and largest id of each block;
a program visits only blocks whose range meets its own, which leaves little where the samples of a group are neighbours
(all S^2 pairs at worst).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import launch
from ..dispatch import on_device_of
from ..rows import flat, flat_mask
from .reference import RELATIVE_RANGE


@triton.jit(do_not_specialize=["samples"])
def id_ranges_kernel(group_id, ranges, samples, BLOCK: tl.constexpr):
    """ranges [blocks, 2]: smallest and largest id of each block."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    # the block's first sample stands in for lanes past the end
    ids = tl.load(group_id + tl.minimum(i, samples - 1)).to(tl.int64)
    anchor = tl.load(group_id + block * BLOCK).to(tl.int64)
    ids = tl.where(i < samples, ids, anchor)
    tl.store(ranges + 2 * block, tl.min(ids, axis=0))
    tl.store(ranges + 2 * block + 1, tl.max(ids, axis=0))


@triton.jit
def _samples(scores, group_id, valid, i, samples, HAS_VALID: tl.constexpr):
    """(counts, id, score) of samples i; what does not count has score 0."""
    some = i < samples
    counts = some
    if HAS_VALID:
        counts = counts & (tl.load(valid + i, mask=some, other=0) != 0)
    ids = tl.load(group_id + i, mask=some, other=0).to(tl.int64)
    score = tl.where(counts, tl.load(scores + i, mask=some, other=0.0).to(tl.float32), 0.0)
    return counts, ids, score


@triton.jit
def _meeting_blocks(ranges, blocks, low_id, high_id, TABLE: tl.constexpr):
    """First and one-past-last block whose id range meets [low_id, high_id]."""
    first = blocks
    past = blocks * 0
    for at in range(0, blocks, TABLE):
        other = at + tl.arange(0, TABLE)
        low = tl.load(ranges + 2 * other, mask=other < blocks, other=0)
        high = tl.load(ranges + 2 * other + 1, mask=other < blocks, other=0)
        meets = (low <= high_id) & (high >= low_id) & (other < blocks)
        first = tl.minimum(first, tl.min(tl.where(meets, other, blocks), axis=0))
        past = tl.maximum(past, tl.max(tl.where(meets, other + 1, 0), axis=0))
    return first, past


@triton.jit(do_not_specialize=["samples", "blocks", "ddof"])
def group_normalize_kernel(
    scores, group_id, valid, ranges, out, samples, blocks, ddof, eps, relative_range,
    HAS_VALID: tl.constexpr, SCALE_STD: tl.constexpr, LEAVE_ONE_OUT: tl.constexpr, TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program BLOCK samples."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mine = block * BLOCK + lane
    counts, ids, score = _samples(scores, group_id, valid, mine, samples, HAS_VALID)
    low_id = tl.load(ranges + 2 * block)
    high_id = tl.load(ranges + 2 * block + 1)
    first, past = _meeting_blocks(ranges, blocks, low_id, high_id, TABLE)
    n = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for other in range(first, past):
        if (tl.load(ranges + 2 * other) <= high_id) & (tl.load(ranges + 2 * other + 1) >= low_id):
            theirs, their_ids, their_score = _samples(scores, group_id, valid, other * BLOCK + lane, samples, HAS_VALID)
            same = (ids[:, None] == their_ids[None, :]) & theirs[None, :]
            n += tl.sum(same.to(tl.float32), axis=1)
            total += tl.sum(tl.where(same, their_score[None, :], 0.0), axis=1)
            low = tl.minimum(low, tl.min(tl.where(same, their_score[None, :], float("inf")), axis=1))
            high = tl.maximum(high, tl.max(tl.where(same, their_score[None, :], float("-inf")), axis=1))
    mean = total / tl.maximum(n, 1.0)
    size = tl.maximum(tl.maximum(tl.abs(low), tl.abs(high)), 1.0)
    # a non-finite score makes the mean non-finite: such a group is not silently flat
    finite = (mean - mean) == 0.0
    flat_group = ((high - low <= relative_range * size) & finite) | (n <= 1.0)
    result = score - mean
    if LEAVE_ONE_OUT:
        result = result * (n / tl.maximum(n - 1.0, 1.0))
    if SCALE_STD:
        squares = tl.zeros([BLOCK], tl.float32)
        for other in range(first, past):
            if (tl.load(ranges + 2 * other) <= high_id) & (tl.load(ranges + 2 * other + 1) >= low_id):
                theirs, their_ids, their_score = _samples(
                    scores, group_id, valid, other * BLOCK + lane, samples, HAS_VALID
                )
                same = (ids[:, None] == their_ids[None, :]) & theirs[None, :]
                deviation = tl.where(same, their_score[None, :] - mean[:, None], 0.0)
                squares += tl.sum(deviation * deviation, axis=1)
        variance = squares / tl.maximum(n - ddof, 1.0)
        result = result / (tl.sqrt_rn(variance) + eps)
    tl.store(out + mine, tl.where(counts & (flat_group == 0), result, 0.0), mask=mine < samples)


def group_normalize_triton(
    scores: torch.Tensor,
    group_id: torch.Tensor,
    valid: torch.Tensor | None,
    scale_std: bool,
    leave_one_out: bool,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    """Same arguments and results as `group_normalize_reference`."""
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    samples = scores.numel()
    if samples == 0:
        return out
    config = launch.config("group_normalize", scores)
    blocks = triton.cdiv(samples, config["BLOCK"])
    ranges = torch.empty(blocks, 2, dtype=torch.int64, device=scores.device)
    ids = flat(group_id)
    with on_device_of(scores):
        id_ranges_kernel[(blocks,)](ids, ranges, samples, BLOCK=config["BLOCK"], num_warps=1)
        group_normalize_kernel[(blocks,)](
            flat(scores), ids, flat_mask(valid), ranges, out, samples, blocks, ddof, eps, RELATIVE_RANGE,
            HAS_VALID=valid is not None, SCALE_STD=scale_std, LEAVE_ONE_OUT=leave_one_out, **config,
        )  # fmt: skip
    return out
