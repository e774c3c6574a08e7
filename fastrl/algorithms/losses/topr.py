"""TOPR: full gradient for good samples, a tapered importance weight for bad ones.  https://arxiv.org/abs/2503.14286

l = -A log_prob where A >= 0;   -A sg(clip(rho, 0, 1)) log_prob where A < 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, indicator, ratio
from fastrl.algorithms.registry import register_policy_loss


@register_policy_loss("topr")
def topr(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenLoss:
    """Tapered loss per token; log_prob, old_log_prob, advantages [T] float."""
    rho = ratio(log_prob.detach(), old_log_prob)
    bad = advantages < 0
    weight = torch.where(bad, rho.clamp(0.0, 1.0), torch.ones_like(rho))
    return TokenLoss(-weight * advantages * log_prob, {"tapered": indicator(bad & (rho < 1), rho), "ratio": rho})
