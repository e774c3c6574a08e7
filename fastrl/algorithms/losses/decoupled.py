"""Decoupled PPO: the trust region is around a proximal policy, not the one that sampled.  https://arxiv.org/abs/2110.00641

    l = w max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)),   rho = pi / pi_prox,   w = min(pi_prox / pi_rollout, cap)

proximal = recompute: pi_prox is the trainer's policy before the update (old_log_prob, one forward).
proximal = loglinear: log pi_prox = log pi_rollout + alpha (sg(log_prob) - log pi_rollout), alpha = (v - 1)/v, v = how
many updates ago the token was sampled: no forward. For engines that sample on while training updates the weights.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, check_clips, clipped, indicator, ratio
from fastrl.algorithms.registry import register_policy_loss


def check(*, clip_low: float, clip_high: float, cap: float, **_: object) -> str | None:
    return check_clips(clip_low, clip_high) if cap > 0 else f"cap = {cap} must be positive"


def more_needs(*, proximal: str, **_: object) -> tuple[str, ...]:
    return ("old_log_prob",) if proximal == "recompute" else ("staleness",)


def loglinear(log_prob: Tensor, rollout_log_prob: Tensor, staleness: Tensor) -> Tensor:
    """The proximal log-prob on the line between sampling and current policy: [T], detached."""
    v = staleness.to(log_prob.dtype)
    alpha = torch.where(v >= 1, (v - 1) / v.clamp(min=1), torch.zeros_like(v))
    return rollout_log_prob + alpha * (log_prob.detach() - rollout_log_prob)


@register_policy_loss("decoupled", needs=("rollout_log_prob",), check=check, more_needs=more_needs)
def decoupled(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    rollout_log_prob: Tensor,
    staleness: Tensor | None = None,
    rollout_weight: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 2.0,
    proximal: Literal["recompute", "loglinear"] = "recompute",
) -> TokenLoss:
    """Clipped surrogate around the proximal policy, with its own behaviour weight; all [T].

    Args:
        staleness: policy updates between the sampling of a token and now, for proximal = loglinear.
        rollout_weight: the correction's weight, taken instead of the behaviour weight where a correction is on.
    """
    prox = old_log_prob
    if proximal == "loglinear":
        if staleness is None:
            raise ValueError("decoupled with proximal = loglinear needs the staleness of each token")
        prox = loglinear(log_prob, rollout_log_prob, staleness)
    known = torch.isfinite(rollout_log_prob)
    behaviour = ratio(prox.detach(), torch.where(known, rollout_log_prob, prox.detach()))
    weight = behaviour.clamp(max=cap) if rollout_weight is None else rollout_weight
    loss, stats = clipped(ratio(log_prob, prox.detach()), advantages, clip_low, clip_high)
    stats |= {"behaviour_weight": weight, "behaviour_capped": indicator(behaviour > cap, weight)}
    return TokenLoss(weight * loss, stats)
