"""The clipped value loss in Triton: loss, gradient and statistics of all tokens in one launch.

Each program writes its partial sums; the last one to arrive adds them in a fixed order, so results are reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import launch
from ..checks import check_cu_seqlens_values
from ..device import clip, is_last_to_arrive, load_float, trained_tokens
from ..dispatch import on_device_of
from ..rows import arrivals, flat, flat_mask, scale_arguments
from ..token_sum import column_sum, token_scale
from .reference import STATS

COLUMNS = len(STATS) + 2  # loss, tokens, the statistics


@triton.jit
def _penalty(error, huber_delta):
    size = tl.abs(error)
    return tl.where(size > huber_delta, huber_delta * (size - 0.5 * huber_delta), 0.5 * error * error)


@triton.jit
def _put(pointer, t, value, total, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + t, value)
    else:
        tl.store(pointer + t, value, mask=t < total)


@triton.jit
def _block(
    values, old_values, returns, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials,
    at, total, row_length, sequences, steps, value_clip, huber_delta,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, PER_TOKEN: tl.constexpr,
    GRADIENT: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = at + tl.arange(0, BLOCK)
    inside = trained_tokens(mask, t, 0, total, total, HAS_MASK, FULL)
    value = tl.where(inside, load_float(values, t, total, FULL), 0.0)
    old = tl.where(inside, load_float(old_values, t, total, FULL), 0.0)
    target = tl.where(inside, load_float(returns, t, total, FULL), 0.0)
    error = value - target
    plain = _penalty(error, huber_delta)
    clipped = _penalty(clip(value, old - value_clip, old + value_clip) - target, huber_delta)
    cut = clipped > plain
    loss = tl.where(cut, clipped, plain)
    slope = tl.where(cut, 0.0, clip(error, -huber_delta, huber_delta))
    if HAS_WEIGHTS:
        w = tl.where(inside, load_float(weights, t, total, FULL), 0.0)
        loss = loss * w
        slope = slope * w
    if PER_TOKEN:
        _put(losses, t, loss, total, FULL)
        _put(stats, t, cut.to(tl.float32), total, FULL)
        _put(stats + total, t, tl.abs(error), total, FULL)
    else:
        factor = token_scale(scale, cu_seqlens, t, total, row_length, sequences, steps, SCALE, FULL)
        loss = loss * factor
        slope = slope * factor
        programs = tl.num_programs(0)
        place = partials + tl.program_id(0)
        tl.store(place, tl.sum(loss, axis=0))
        tl.store(place + programs, tl.sum(inside.to(tl.float32), axis=0))
        tl.store(place + 2 * programs, tl.sum(cut.to(tl.float32), axis=0))
        tl.store(place + 3 * programs, tl.sum(tl.abs(error), axis=0))
    if GRADIENT:
        _put(gradient, t, slope, total, FULL)


@triton.jit(do_not_specialize=["row_length", "sequences", "steps"])
def value_loss_kernel(
    values, old_values, returns, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials, counter,
    total, row_length, sequences, steps, value_clip, huber_delta,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, PER_TOKEN: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program BLOCK tokens; without PER_TOKEN the last to arrive writes loss and statistics."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if at + BLOCK <= total:
        _block(
            values, old_values, returns, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials,
            at, total, row_length, sequences, steps, value_clip, huber_delta,
            HAS_MASK, HAS_WEIGHTS, SCALE, PER_TOKEN, GRADIENT, True, BLOCK,
        )  # fmt: skip
    else:
        _block(
            values, old_values, returns, mask, weights, scale, cu_seqlens, losses, stats, gradient, partials,
            at, total, row_length, sequences, steps, value_clip, huber_delta,
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
            tl.store(stats, column_sum(partials, 2, programs, BLOCK) / some)
            tl.store(stats + 1, column_sum(partials, 3, programs, BLOCK) / some)
            tl.store(stats + 2, count)


def clipped_value_loss_triton(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    value_clip: float,
    huber_delta: float,
    per_token: bool,
    want_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same arguments and results as `clipped_value_loss_reference`."""
    check_cu_seqlens_values("clipped_value_loss", cu_seqlens, values.numel())
    shape, total, device = values.shape, values.numel(), values.device
    like: dict[str, Any] = {"dtype": torch.float32, "device": device}
    gradient = torch.empty(shape if want_gradient else (0,), **like)
    if per_token:
        losses, stats = torch.empty(shape, **like), torch.empty(len(STATS), *shape, **like)
    else:
        losses, stats = torch.empty((), **like), torch.empty(len(STATS) + 1, **like)
    if total == 0:
        return losses.zero_(), stats.zero_(), gradient
    config = launch.config("token_loss", values)
    programs = triton.cdiv(total, config["BLOCK"])
    partials = None if per_token else torch.empty(COLUMNS, programs, **like)
    (scale_, offsets, length, sequences, steps), kind = scale_arguments(values, scale, cu_seqlens)
    data = (flat(values), flat(old_values), flat(returns), flat_mask(mask))
    with on_device_of(values):
        value_loss_kernel[(programs,)](
            *data, None if weights is None else flat(weights), scale_, offsets, losses, stats, gradient, partials,
            None if per_token else arrivals(device), total, length, sequences, steps, value_clip, huber_delta,
            HAS_MASK=mask is not None, HAS_WEIGHTS=weights is not None, SCALE=kind,
            PER_TOKEN=per_token, GRADIENT=want_gradient, **config,
        )  # fmt: skip
    return losses, stats, gradient
