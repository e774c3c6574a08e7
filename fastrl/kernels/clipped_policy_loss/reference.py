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
INFINITY = float("inf")
STATS = ("clip_high", "clip_low", "clip_dual", "k1", "k3", "ratio")


class Terms(NamedTuple):
    """Per-token quantities, each [T]; `slope` is d loss / d log_prob, the clip_* are bool."""

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
    raw = log_prob - old_log_prob
    log_ratio = raw.clamp(-LIMIT, LIMIT)
    excess = torch.expm1(log_ratio)
    ratio = excess + 1
    pull = advantages.neg()
    negative = advantages < 0
    slope = pull * ratio
    plain = slope if max_ratio == INFINITY else pull * ratio.clamp(max=max_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high).mul_(pull)
    cut = plain < clipped
    loss = torch.where(cut, clipped, plain)
    # outside the clamp (where raw and log_ratio differ; a NaN is no case of it) and above the cap nothing moves
    stopped = cut | (raw.abs() > LIMIT)
    if max_ratio != INFINITY:
        stopped |= ratio > max_ratio
    dual = torch.zeros_like(cut)
    if dual_clip != INFINITY:
        bound = pull.mul_(dual_clip)
        dual = negative & (loss > bound)
        loss = torch.where(dual, bound, loss)
        stopped |= dual
    return Terms(
        loss=loss,
        slope=slope.masked_fill(stopped, 0.0),
        clip_high=cut & (advantages > 0),
        clip_low=cut & negative,
        clip_dual=dual,
        k1=log_ratio.neg(),
        k3=excess.sub_(log_ratio),  # ratio - 1 - log ratio loses every digit near 1
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
        x = x.reshape(-1).to(dtype)
        return x if mask is None else torch.where(inside, x, zero)

    terms = policy_terms(
        flat(log_prob), flat(old_log_prob), flat(advantages), clip_low, clip_high, dual_clip, max_ratio
    )
    loss, slope = terms.loss, terms.slope
    if weights is not None:
        w = flat(weights)
        loss, slope = loss * w, slope * w
    if per_token:
        stats = torch.stack([x.to(dtype) for x in terms[2:]])
        if mask is not None:
            stats = torch.where(inside, stats, zero)
        stats = stats.reshape(len(STATS), *log_prob.shape)
        gradient = slope.reshape(log_prob.shape) if want_gradient else slope.new_empty(0)
        return loss.reshape(log_prob.shape), stats, gradient
    count = inside.sum().to(dtype)
    sums = torch.stack([x.sum().to(dtype) for x in terms[2:]])
    sums[-1] -= log_prob.numel() - count  # a masked token has log-ratio 0: all else is 0 there, its ratio 1
    largest = (terms.ratio * inside).amax() if log_prob.numel() else zero
    stats = torch.cat([sums / count.clamp(min=1), largest.reshape(1), count.reshape(1)])
    if scale is None:
        total = loss.sum() / count.clamp(min=1)
    else:
        factor = token_scale(scale.to(dtype), log_prob, cu_seqlens)
        total, slope = (loss * factor).sum(), slope * factor
    return total, stats, slope.reshape(log_prob.shape) if want_gradient else slope.new_empty(0)
