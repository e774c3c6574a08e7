"""DRO: the policy gradient with a quadratic penalty on the log ratio.  https://arxiv.org/abs/2405.19107

l = -(log_prob A - beta/2 d^2),   beta > 0;   also the loss of https://arxiv.org/abs/2501.12599
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, log_ratio
from fastrl.algorithms.registry import register_policy_loss


def check(*, beta: float) -> str | None:
    return None if beta > 0 else f"beta = {beta} must be positive"


@register_policy_loss("kimi", check=check)
@register_policy_loss("dro", check=check)
def dro(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """Penalised policy-gradient loss per token; log_prob, old_log_prob, advantages [T] float.

    Raises:
        ValueError: beta is not positive.
    """
    problem = check(beta=beta)
    if problem:
        raise ValueError(problem)
    penalty = 0.5 * beta * log_ratio(log_prob, old_log_prob).square()
    return TokenLoss(-log_prob * advantages + penalty, {"penalty": penalty.detach()})
