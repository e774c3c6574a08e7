"""Sequence-level clipping with the plain gradient of the geometric-mean ratio.  https://arxiv.org/abs/2507.18071

    rho = exp(sum(d m) / max(L, 1));   l = max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)),   A = mean(A_t)

One value per sequence, given to each of its tokens; the gradient of rho goes through every token.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, check_clips, clipped
from fastrl.algorithms.losses.sequence_ratio import mean_log_ratio
from fastrl.algorithms.ragged import sequence_mean, spread
from fastrl.algorithms.registry import register_policy_loss


def check(*, clip_low: float, clip_high: float, **_: object) -> str | None:
    return check_clips(clip_low, clip_high)


@register_policy_loss("clip_sequence", level="sequence", check=check, loss_agg_mode="seq-mean-token-mean")
def clip_sequence(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Clipped sequence surrogate; all [T] but cu_seqlens [S+1]."""
    rho = mean_log_ratio(log_prob, old_log_prob, loss_mask, cu_seqlens).clamp(max=10.0).exp()
    of_sequence = spread(sequence_mean(advantages, loss_mask, cu_seqlens), cu_seqlens, rho.numel())
    return TokenLoss(*clipped(rho, of_sequence, clip_low, clip_high))
