"""VESPO: a soft kernel of the whole sequence's importance weight.  https://arxiv.org/abs/2602.10693

w = exp(sum d m), clamped to [1e-8, e^20];   log phi = lam + k log w - lam w
l_t = -sg(phi) A log_prob;   (k, lam) = (k_pos, lam_pos) where A >= 0, (k_neg, lam_neg) elsewhere
"""

from __future__ import annotations

import math

from torch import Tensor

from fastrl.algorithms.losses.base import MAX_LOG_RATIO, TokenLoss, choose, log_ratio
from fastrl.algorithms.ragged import sequence_sum, spread
from fastrl.algorithms.registry import register_policy_loss

MODES = ("token-mean", "token-sum")


def check(*, k_pos: float, lam_pos: float, k_neg: float, lam_neg: float) -> str | None:
    values = {"k_pos": k_pos, "lam_pos": lam_pos, "k_neg": k_neg, "lam_neg": lam_neg}
    wrong = [f"{name} = {value}" for name, value in values.items() if not value >= 0]
    return f"{', '.join(wrong)}: must not be negative" if wrong else None


@register_policy_loss("vespo", level="sequence", check=check, only_loss_agg_modes=MODES)
def vespo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
) -> TokenLoss:
    """Kernel-weighted policy gradient; all [T] but cu_seqlens [S+1]. The kernel is 1 where the policies agree."""
    d = log_ratio(log_prob.detach(), old_log_prob)
    log_w = spread(sequence_sum(d, loss_mask, cu_seqlens), cu_seqlens, d.numel())
    log_w = log_w.clamp(math.log(1e-8), MAX_LOG_RATIO)
    good = advantages >= 0
    k, lam = choose(good, k_pos, k_neg, d), choose(good, lam_pos, lam_neg, d)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    return TokenLoss(-phi * advantages * log_prob, {"phi": phi, "ratio": log_w.exp()})
