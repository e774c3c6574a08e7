"""The clipped value loss, its gradient and its statistics in plain torch.

    h(e) = e^2 / 2, or Huber with huber_delta
    loss = max(h(v - R), h(clip(v, v_old - c, v_old + c) - R))

An infinite `value_clip` or `huber_delta` is off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..aggregation.reference import token_scale
from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..ragged import bool_mask

STATS = ("clip", "abs_error")


class Terms(NamedTuple):
    """Per-token quantities, each [T]; `slope` is d loss / d value."""

    loss: torch.Tensor
    slope: torch.Tensor
    clip: torch.Tensor
    abs_error: torch.Tensor


def penalty(error: torch.Tensor, huber_delta: float) -> torch.Tensor:
    """e^2 / 2 up to |e| = huber_delta, linear beyond."""
    size = error.abs()
    square = 0.5 * error * error
    if huber_delta == float("inf"):
        return square
    return torch.where(size <= huber_delta, square, huber_delta * (size - 0.5 * huber_delta))


def value_terms(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float, huber_delta: float
) -> Terms:
    """Loss, slope and statistics of each token; all [T] of one dtype."""
    error = values - returns
    plain = penalty(error, huber_delta)
    held = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    clipped = penalty(held - returns, huber_delta)
    cut = clipped > plain
    slope = torch.where(cut, torch.zeros_like(error), error.clamp(-huber_delta, huber_delta))
    return Terms(torch.where(cut, clipped, plain), slope, cut.to(error.dtype), error.abs())


def clipped_value_loss_reference(
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
    """(loss, stats, d loss / d values).

    per_token: loss and gradient like values, stats [2, *values.shape]. Else: loss scalar, stats [3] = masked means of
    the two and the number of tokens; the gradient lacks the division by that number if `scale` is None.
    """
    check_cu_seqlens_values("clipped_value_loss", cu_seqlens, values.numel())
    dtype = accumulate_dtype(values, old_values, returns)
    inside = bool_mask(mask, values)
    zero = torch.zeros((), dtype=dtype, device=values.device)

    def flat(x: torch.Tensor) -> torch.Tensor:
        return torch.where(inside, x.reshape(-1).to(dtype), zero)

    terms = value_terms(flat(values), flat(old_values), flat(returns), value_clip, huber_delta)
    loss, slope = terms.loss, terms.slope
    if weights is not None:
        w = flat(weights)
        loss, slope = loss * w, slope * w
    each = torch.where(inside, torch.stack(terms[2:]), zero)
    gradient = slope if want_gradient else slope.new_empty(0)
    if per_token:
        stats = each.reshape(len(STATS), *values.shape)
        return loss.reshape(values.shape), stats, gradient.reshape(values.shape) if want_gradient else gradient
    count = inside.sum().to(dtype)
    stats = torch.cat([each.sum(1) / count.clamp(min=1), count.reshape(1)])
    if scale is None:
        total = loss.sum() / count.clamp(min=1)
    else:
        factor = token_scale(scale.to(dtype), values, cu_seqlens)
        total, gradient = (loss * factor).sum(), gradient * factor if want_gradient else gradient
    return total, stats, gradient.reshape(values.shape) if want_gradient else gradient
