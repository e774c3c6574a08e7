"""DPPO: a token is dropped when its probability moved too far in the direction of its advantage.

    l = -A sg(min(rho, cap)) log_prob keep                                       https://arxiv.org/abs/2602.04879
    tv   keep = p - p_old <= clip_high        where A > 0;   p - p_old >= -clip_low       elsewhere
    kl   keep = kappa <= clip_high or p <= p_old where A > 0;  kappa <= clip_low or p >= p_old elsewhere
         kappa = p_old (log p_old - log p) + (1 - p_old) log((1 - p_old) / (1 - p))

The clip distances are divergences of the two-way distribution (this token, any other), not ratios.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, indicator, ratio
from fastrl.algorithms.registry import register_policy_loss

TINY = 1e-8  # keeps the logarithm of 1 - p finite


def check(*, clip_low: float, clip_high: float, cap: float) -> str | None:
    if clip_low < 0 or clip_high < 0:
        return f"clip_low = {clip_low} and clip_high = {clip_high} are divergences and must not be negative"
    return None if cap > 0 else f"cap = {cap} must be positive"


def weighted(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, keep: Tensor, cap: float) -> TokenLoss:
    """-A sg(min(rho, cap)) log_prob keep, [T]."""
    rho = ratio(log_prob.detach(), old_log_prob)
    loss = torch.where(keep, -advantages * rho.clamp(max=cap) * log_prob, torch.zeros_like(log_prob))
    stats = {"clip_fraction": indicator(~keep, rho), "capped": indicator(keep & (rho > cap), rho), "ratio": rho}
    return TokenLoss(loss, stats)


@register_policy_loss("dppo_tv", check=check)
def dppo_tv(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 20.0,
) -> TokenLoss:
    """Loss per token with the total-variation rule; log_prob, old_log_prob, advantages [T] float."""
    moved = log_prob.detach().exp() - old_log_prob.exp()
    keep = torch.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
    return weighted(log_prob, old_log_prob, advantages, keep, cap)


@register_policy_loss("dppo_kl", check=check)
def dppo_kl(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 20.0,
) -> TokenLoss:
    """Loss per token with the binary-KL rule; log_prob, old_log_prob, advantages [T] float."""
    new = log_prob.detach()
    p, p_old = new.exp(), old_log_prob.exp()
    kappa = p_old * (old_log_prob - new) + (1 - p_old) * torch.log((1 - p_old + TINY) / (1 - p + TINY))
    keep = torch.where(advantages > 0, (kappa <= clip_high) | (p <= p_old), (kappa <= clip_low) | (p >= p_old))
    return weighted(log_prob, old_log_prob, advantages, keep, cap)
