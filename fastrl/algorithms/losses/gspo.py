"""GSPO: the ratio of a sequence is the geometric mean of its token ratios, clipped as one.  https://arxiv.org/abs/2507.18071

    s = sum(d m) / max(L, 1);   log rho_t = log_prob - sg(log_prob) + sg(s), at most 10
    l_t = max(-A rho_t, -A clip(rho_t, 1-clip_low, 1+clip_high))        aggregated as seq-mean-token-mean

A mean log ratio is small: the paper's clip distances are 3e-4 and 4e-4. `gspo_token` is the same with advantages that
differ between the tokens of a sequence.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, check_clips, clipped
from fastrl.algorithms.losses.sequence_ratio import own_token_ratio
from fastrl.algorithms.ragged import sequence_mean, spread
from fastrl.algorithms.registry import register_policy_loss


def check(*, clip_low: float, clip_high: float, **_: object) -> str | None:
    return check_clips(clip_low, clip_high)


@register_policy_loss("gspo", level="sequence", check=check, loss_agg_mode="seq-mean-token-mean")
def gspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Sequence-clipped surrogate; all [T] but cu_seqlens [S+1]; a sequence's advantage is the mean over its tokens."""
    rho = own_token_ratio(log_prob, old_log_prob, loss_mask, cu_seqlens)
    of_sequence = spread(sequence_mean(advantages, loss_mask, cu_seqlens), cu_seqlens, rho.numel())
    return TokenLoss(*clipped(rho, of_sequence, clip_low, clip_high))


@register_policy_loss("gspo_token", level="sequence", check=check, loss_agg_mode="seq-mean-token-mean")
def gspo_token(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """As gspo, with the advantages of the tokens as they are."""
    rho = own_token_ratio(log_prob, old_log_prob, loss_mask, cu_seqlens)
    return TokenLoss(*clipped(rho, advantages, clip_low, clip_high))
