"""GMPO: geometric mean of token ratios that were clipped one by one in log space.  https://arxiv.org/abs/2507.20673

    d' = sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high))
    ratio_i = exp(sum(d' m) / max(L, 1));   l_i = -mean(A) ratio_i;   loss = sum_i l_i / N_seq

One value per sequence, given to each of its tokens; seq-mean-token-mean gives it back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, indicator, log_ratio
from fastrl.algorithms.ragged import sequence_mean, spread
from fastrl.algorithms.registry import F, register_policy_loss


def check(*, clip_low: float, clip_high: float) -> str | None:
    if clip_low < 0 or clip_high < 0:
        return f"clip_low = {clip_low} and clip_high = {clip_high} are log-ratio distances and must not be negative"
    return None


def named(name: str) -> Callable[[F], F]:
    """Registration under one of the two names."""
    mode = "seq-mean-token-mean"
    return register_policy_loss(name, level="sequence", check=check, loss_agg_mode=mode, only_loss_agg_modes=(mode,))


@named("geo_mean")
@named("gmpo")
def gmpo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    rollout_weight: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Geometric-mean surrogate; all [T] but cu_seqlens [S+1]. Clip distances are in nats of the token's log ratio.

    rollout_weight: correction weights of the tokens; a sequence gets their geometric mean.
    """
    d = log_ratio(log_prob, old_log_prob)
    bounded = d.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    lowest = sign * torch.minimum(sign * d, sign * bounded)
    sequence_ratio = sequence_mean(lowest, loss_mask, cu_seqlens).exp()
    loss = -sequence_mean(advantages, loss_mask, cu_seqlens) * sequence_ratio
    if rollout_weight is not None:
        log_weight = rollout_weight.detach().clamp(min=1e-10).log()
        loss = loss * sequence_mean(log_weight, loss_mask, cu_seqlens).exp()
    stats = {
        "clip_high": indicator((d > clip_high) & (advantages > 0), d),
        "clip_low": indicator((d < -clip_low) & (advantages < 0), d),
        "ratio": spread(sequence_ratio.detach(), cu_seqlens, d.numel()),
    }
    return TokenLoss(spread(loss, cu_seqlens, d.numel()), stats)
