"""Imitation of one's own good samples.  https://arxiv.org/abs/2504.05118

l = -mu log_prob where A > 0, 0 elsewhere
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, indicator
from fastrl.algorithms.registry import register_policy_loss


def check(*, mu: float) -> str | None:
    return None if mu > 0 else f"mu = {mu} must be positive"


@register_policy_loss("positive_nll", check=check)
@register_policy_loss("cross_entropy", check=check)
def cross_entropy(log_prob: Tensor, advantages: Tensor, *, mu: float = 1.0) -> TokenLoss:
    """Negative log-likelihood of tokens with a positive advantage; log_prob, advantages [T] float."""
    good = advantages > 0
    loss = torch.where(good, -mu * log_prob, torch.zeros_like(log_prob))
    return TokenLoss(loss, {"imitated": indicator(good, log_prob)})
