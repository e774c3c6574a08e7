"""The clipped ratio loss, its gradient and its statistics in plain torch.

    rho = exp(clamp(log_prob - old_log_prob, -20, 20))
    loss = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));   A < 0: min(loss, -A dual_clip)

An infinite `dual_clip` or `max_ratio` (a cap on rho in the first term) is off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..aggregation.reference import token_scale
from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..ragged import bool_mask

LIMIT = 20.0  # of the log ratio
STATS = ("clip_high", "clip_low", "clip_dual", "k1", "k3", "ratio")


class Terms(NamedTuple):
    """Per-token quantities, each [T]; `slope` is d loss / d log_prob."""

    loss: torch.Tensor
    slope: torch.Tensor
    clip_high: torch.Tensor
    clip_low: torch.Tensor
    clip_dual: torch.Tensor
    k1: torch.Tensor
    k3: torch.Tensor
    ratio: torch.Tensor


def policy_terms(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    max_ratio: float,
) -> Terms:
    """Loss, slope and statistics of each token; all [T] of one dtype."""
    zero = torch.zeros_like(log_prob)
    raw = log_prob - old_log_prob
    log_ratio = raw.clamp(-LIMIT, LIMIT)
    ratio = log_ratio.exp()
    held = (raw.abs() > LIMIT) | (ratio > max_ratio)
    plain = -advantages * ratio.clamp(max=max_ratio)
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    cut = plain < clipped
    loss = torch.where(cut, clipped, plain)
    slope = torch.where(cut | held, zero, -advantages * ratio)
    bound = -advantages * dual_clip if dual_clip != float("inf") else torch.full_like(zero, float("inf"))
    dual = (advantages < 0) & (loss > bound)
    return Terms(
        loss=torch.where(dual, bound, loss),
        slope=torch.where(dual, zero, slope),
        clip_high=(cut & (advantages > 0)).to(loss.dtype),
        clip_low=(cut & (advantages < 0)).to(loss.dtype),
        clip_dual=dual.to(loss.dtype),
        k1=-log_ratio,
        k3=torch.expm1(log_ratio) - log_ratio,  # ratio - 1 - log ratio loses every digit near 1
        ratio=ratio,
    )


def clipped_policy_loss_reference(
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
    """(loss, stats, d loss / d log_prob).

    per_token: loss and gradient like log_prob, stats [6, *log_prob.shape]. Else: loss scalar, stats [8] = masked means
    of the six, largest ratio, number of tokens; the gradient lacks the division by that number if `scale` is None.
    """
    check_cu_seqlens_values("clipped_policy_loss", cu_seqlens, log_prob.numel())
    dtype = accumulate_dtype(log_prob, old_log_prob, advantages)
    inside = bool_mask(mask, log_prob)
    zero = torch.zeros((), dtype=dtype, device=log_prob.device)

    def flat(x: torch.Tensor) -> torch.Tensor:
        return torch.where(inside, x.reshape(-1).to(dtype), zero)

    terms = policy_terms(
        flat(log_prob), flat(old_log_prob), flat(advantages), clip_low, clip_high, dual_clip, max_ratio
    )
    loss, slope = terms.loss, terms.slope
    if weights is not None:
        w = flat(weights)
        loss, slope = loss * w, slope * w
    if per_token:
        stats = torch.where(inside, torch.stack(terms[2:]), zero).reshape(len(STATS), *log_prob.shape)
        gradient = slope.reshape(log_prob.shape) if want_gradient else slope.new_empty(0)
        return loss.reshape(log_prob.shape), stats, gradient
    count = inside.sum().to(dtype)
    means = torch.where(inside, torch.stack(terms[2:]), zero).sum(1) / count.clamp(min=1)
    largest = torch.cat([torch.where(inside, terms.ratio, zero), zero.reshape(1)]).amax()
    stats = torch.cat([means, largest.reshape(1), count.reshape(1)])
    if scale is None:
        total = loss.sum() / count.clamp(min=1)
    else:
        factor = token_scale(scale.to(dtype), log_prob, cu_seqlens)
        total, slope = (loss * factor).sum(), slope * factor
    return total, stats, slope.reshape(log_prob.shape) if want_gradient else slope.new_empty(0)
