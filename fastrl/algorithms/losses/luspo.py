"""LUSPO: the sequence-ratio clip loss times the response's length.  https://arxiv.org/abs/2602.05261

    l_i = L_i max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)), rho as in gspo;   loss = sum_i l_i / N_seq

Each token carries its sequence's clip loss, so that the sum over tokens gives the factor L_i.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, check_clips
from fastrl.algorithms.losses.gspo import gspo
from fastrl.algorithms.registry import register_policy_loss


def check(*, clip_low: float, clip_high: float, **_: object) -> str | None:
    return check_clips(clip_low, clip_high)


@register_policy_loss(
    "luspo",
    level="sequence",
    check=check,
    loss_agg_mode="seq-mean-token-sum",
    only_loss_agg_modes=("seq-mean-token-sum",),
)
def luspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """The gspo token losses, which seq-mean-token-sum turns into length-weighted ones; all [T] but cu_seqlens [S+1]."""
    return gspo(log_prob, old_log_prob, advantages, loss_mask, cu_seqlens, clip_low=clip_low, clip_high=clip_high)
