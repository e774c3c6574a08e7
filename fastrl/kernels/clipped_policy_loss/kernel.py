"""The clipped ratio loss in Triton: loss, gradient and statistics of all tokens in one launch.

Each program writes its partial sums; the last one to arrive adds them in a fixed order, so results are reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import launch
from ..checks import check_cu_seqlens_values
from ..device import clip, exp_minus_1_minus, is_last_to_arrive, load_float, trained_tokens
from ..dispatch import on_device_of
from ..rows import arrivals, flat, flat_mask, scale_arguments
from ..token_sum import column_max, column_sum, token_scale
from .reference import LIMIT, STATS

COLUMNS = len(STATS) + 3  # loss, tokens, the statistics, largest ratio


@triton.jit
def _terms(lp, old, adv, clip_low, clip_high, dual_clip, max_ratio, limit):
    """(loss, slope, clip_high, clip_low, clip_dual, k1, k3, ratio) as in `policy_terms`."""
    raw = lp - old
    log_ratio = clip(raw, -limit, limit)
    ratio = tl.exp(log_ratio)
    held = (raw > limit) | (raw < -limit) | (ratio > max_ratio)
    plain = -adv * tl.where(ratio > max_ratio, max_ratio, ratio)
    clipped = -adv * clip(ratio, 1 - clip_low, 1 + clip_high)
    cut = plain < clipped
    loss = tl.where(cut, clipped, plain)
    slope = tl.where(cut | held, 0.0, -adv * ratio)
    # adv = 0 times an infinite bound would be NaN: it is never compared then
    bound = tl.where(adv < 0, -adv * dual_clip, 0.0)
    dual = (adv < 0) & (loss > bound)
    loss = tl.where(dual, bound, loss)
    slope = tl.where(dual, 0.0, slope)
    high = (cut & (adv > 0)).to(tl.float32)
    low = (cut & (adv < 0)).to(tl.float32)
    return loss, slope, high, low, dual.to(tl.float32), -log_ratio, exp_minus_1_minus(log_ratio), ratio


@triton.jit
def _put(pointer, t, value, total, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + t, value)
    else:
        tl.store(pointer + t, value, mask=t < total)


@triton.jit
def _block(
    log_prob, old_log_prob, advantages, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials,
    at, total, row_length, sequences, steps, clip_low, clip_high, dual_clip, max_ratio, limit,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, PER_TOKEN: tl.constexpr,
    GRADIENT: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = at + tl.arange(0, BLOCK)
    inside = trained_tokens(mask, t, 0, total, total, HAS_MASK, FULL)
    lp = tl.where(inside, load_float(log_prob, t, total, FULL), 0.0)
    old = tl.where(inside, load_float(old_log_prob, t, total, FULL), 0.0)
    adv = tl.where(inside, load_float(advantages, t, total, FULL), 0.0)
    loss, slope, high, low, dual, k1, k3, ratio = _terms(lp, old, adv, clip_low, clip_high, dual_clip, max_ratio, limit)
    if HAS_WEIGHTS:
        w = tl.where(inside, load_float(weights, t, total, FULL), 0.0)
        loss = loss * w
        slope = slope * w
    k1 = tl.where(inside, k1, 0.0)
    ratio = tl.where(inside, ratio, 0.0)
    if PER_TOKEN:
        _put(losses, t, loss, total, FULL)
        _put(stats, t, high, total, FULL)
        _put(stats + total, t, low, total, FULL)
        _put(stats + 2 * total, t, dual, total, FULL)
        _put(stats + 3 * total, t, k1, total, FULL)
        _put(stats + 4 * total, t, k3, total, FULL)
        _put(stats + 5 * total, t, ratio, total, FULL)
    else:
        factor = token_scale(scale, cu_seqlens, t, total, row_length, sequences, steps, SCALE, FULL)
        loss = loss * factor
        slope = slope * factor
        programs = tl.num_programs(0)
        place = partials + tl.program_id(0)
        tl.store(place, tl.sum(loss, axis=0))
        tl.store(place + programs, tl.sum(inside.to(tl.float32), axis=0))
        tl.store(place + 2 * programs, tl.sum(high, axis=0))
        tl.store(place + 3 * programs, tl.sum(low, axis=0))
        tl.store(place + 4 * programs, tl.sum(dual, axis=0))
        tl.store(place + 5 * programs, tl.sum(k1, axis=0))
        tl.store(place + 6 * programs, tl.sum(k3, axis=0))
        tl.store(place + 7 * programs, tl.sum(ratio, axis=0))
        tl.store(place + 8 * programs, tl.max(ratio, axis=0))
    if GRADIENT:
        _put(gradient, t, slope, total, FULL)


@triton.jit(do_not_specialize=["row_length", "sequences", "steps"])
def policy_loss_kernel(
    log_prob, old_log_prob, advantages, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials, counter,
    total, row_length, sequences, steps, clip_low, clip_high, dual_clip, max_ratio, limit,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, PER_TOKEN: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program BLOCK tokens; without PER_TOKEN the last to arrive writes loss and statistics."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if at + BLOCK <= total:
        _block(
            log_prob, old_log_prob, advantages, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials,
            at, total, row_length, sequences, steps, clip_low, clip_high, dual_clip, max_ratio, limit,
            HAS_MASK, HAS_WEIGHTS, SCALE, PER_TOKEN, GRADIENT, True, BLOCK,
        )  # fmt: skip
    else:
        _block(
            log_prob, old_log_prob, advantages, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials,
            at, total, row_length, sequences, steps, clip_low, clip_high, dual_clip, max_ratio, limit,
            HAS_MASK, HAS_WEIGHTS, SCALE, PER_TOKEN, GRADIENT, False, BLOCK,
        )  # fmt: skip
    if not PER_TOKEN:
        programs = tl.num_programs(0)
        if is_last_to_arrive(counter, programs):
            count = column_sum(partials, 1, programs, BLOCK)
            some = tl.maximum(count, 1.0)
            loss = column_sum(partials, 0, programs, BLOCK)
            if SCALE == 0:
                loss = loss / some
            tl.store(losses, loss)
            for i in tl.static_range(6):
                tl.store(stats + i, column_sum(partials, 2 + i, programs, BLOCK) / some)
            tl.store(stats + 6, column_max(partials, 8, programs, BLOCK))
            tl.store(stats + 7, count)


def clipped_policy_loss_triton(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    max_ratio: float,
    per_token: bool,
    want_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same arguments and results as `clipped_policy_loss_reference`."""
    check_cu_seqlens_values("clipped_policy_loss", cu_seqlens, log_prob.numel())
    shape, total, device = log_prob.shape, log_prob.numel(), log_prob.device
    like: dict[str, Any] = {"dtype": torch.float32, "device": device}
    gradient = torch.empty(shape if want_gradient else (0,), **like)
    if per_token:
        losses, stats = torch.empty(shape, **like), torch.empty(len(STATS), *shape, **like)
    else:
        losses, stats = torch.empty((), **like), torch.empty(len(STATS) + 2, **like)
    if total == 0:
        return losses.zero_(), stats.zero_(), gradient
    config = launch.config("token_loss", log_prob)
    programs = triton.cdiv(total, config["BLOCK"])
    partials = None if per_token else torch.empty(COLUMNS, programs, **like)
    (scale_, offsets, length, sequences, steps), kind = scale_arguments(log_prob, scale, cu_seqlens)
    data = (flat(log_prob), flat(old_log_prob), flat(advantages), flat_mask(mask))
    with on_device_of(log_prob):
        policy_loss_kernel[(programs,)](
            *data, None if weights is None else flat(weights), scale_, offsets, losses, stats, gradient, partials,
            None if per_token else arrivals(device), total, length, sequences, steps, clip_low, clip_high, dual_clip,
            max_ratio, LIMIT, HAS_MASK=mask is not None, HAS_WEIGHTS=weights is not None, SCALE=kind,
            PER_TOKEN=per_token, GRADIENT=want_gradient, **config,
        )  # fmt: skip
    return losses, stats, gradient
