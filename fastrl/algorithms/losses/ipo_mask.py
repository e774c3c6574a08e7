"""IPO mask: tokens whose probability differs too much between trainer and engine are dropped.

    l = -A rho keep,   keep = |p - p_rollout| <= max_difference          https://docs.primeintellect.ai/prime-rl/ipo

A token without an engine log-prob is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, indicator, ratio
from fastrl.algorithms.registry import register_policy_loss


def check(*, max_difference: float) -> str | None:
    return None if 0 < max_difference <= 1 else f"max_difference = {max_difference} must be above 0 and at most 1"


@register_policy_loss("ipo_mask", needs=("rollout_log_prob",), check=check)
def ipo_mask(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    rollout_log_prob: Tensor,
    *,
    max_difference: float = 0.1,
) -> TokenLoss:
    """Masked surrogate per token; all [T] float. max_difference is a probability."""
    apart = (log_prob.detach().exp() - rollout_log_prob.exp()).abs()
    keep = ~(apart > max_difference)
    rho = ratio(log_prob, old_log_prob)
    loss = torch.where(keep, -advantages * rho, torch.zeros_like(rho))
    return TokenLoss(loss, {"clip_fraction": indicator(~keep, rho), "ratio": rho.detach()})
