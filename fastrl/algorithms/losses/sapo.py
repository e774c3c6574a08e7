"""SAPO: a smooth gate instead of a clip.  https://arxiv.org/abs/2511.20347

l = -f(rho) A,   f(rho) = sigmoid(tau (rho - 1)) 4/tau,   tau = tau_pos where A > 0, tau_neg elsewhere
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, choose, ratio
from fastrl.algorithms.registry import register_policy_loss


def check(*, tau_pos: float, tau_neg: float) -> str | None:
    if not (tau_pos > 0 and tau_neg > 0):
        return f"tau_pos = {tau_pos} and tau_neg = {tau_neg} must be positive"
    return None


@register_policy_loss("sapo", check=check, loss_agg_mode="seq-mean-token-mean")
def sapo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> TokenLoss:
    """Soft-gated surrogate per token; log_prob, old_log_prob, advantages [T] float."""
    rho = ratio(log_prob, old_log_prob)
    tau = choose(advantages > 0, tau_pos, tau_neg, rho.detach())
    gate = torch.sigmoid(tau * (rho - 1.0)) * (4.0 / tau)
    return TokenLoss(-gate * advantages, {"gate": gate.detach(), "ratio": rho.detach()})
