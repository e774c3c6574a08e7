"""CISPO: the clipped ratio is a constant weight, so that clipped tokens keep their gradient.  https://arxiv.org/abs/2506.13585

    l = -sg(clip(rho, 1-clip_low, 1+clip_high)) A log_prob

Option max_ratio: the weight is min(rho, max_ratio) instead, without a lower bound.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, check_clips, indicator, ratio
from fastrl.algorithms.registry import register_policy_loss


def check(*, clip_low: float, clip_high: float, max_ratio: float | None, **_: object) -> str | None:
    if max_ratio is not None and not max_ratio > 0:
        return f"max_ratio = {max_ratio} must be positive, or null"
    return check_clips(clip_low, clip_high)


@register_policy_loss("cispo", check=check)
def cispo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float | None = None,
) -> TokenLoss:
    """Loss per token with a detached clipped ratio; log_prob, old_log_prob, advantages [T] float."""
    rho = ratio(log_prob.detach(), old_log_prob)
    lower, upper = (0.0, max_ratio) if max_ratio is not None else (1.0 - clip_low, 1.0 + clip_high)
    weight = rho.clamp(lower, upper)
    stats = {"clip_high": indicator(rho > upper, rho), "clip_low": indicator(rho < lower, rho), "ratio": rho}
    return TokenLoss(-weight * advantages * log_prob, stats)
