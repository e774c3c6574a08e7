"""The plain policy gradient.  https://doi.org/10.1007/BF00992696, as the loss of GPG https://arxiv.org/abs/2504.02546

l = -log_prob A
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss
from fastrl.algorithms.registry import register_policy_loss


@register_policy_loss("gpg")
@register_policy_loss("reinforce")
def reinforce(log_prob: Tensor, advantages: Tensor) -> TokenLoss:
    """Policy-gradient loss per token; log_prob, advantages [T] float."""
    return TokenLoss(-log_prob * advantages)
