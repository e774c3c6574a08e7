"""Clip-Cov: a few tokens with high covariance of log-prob and advantage leave the loss.  https://arxiv.org/abs/2505.22617

    l = corr max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)),   corr in {0, 1}
    cov_t = (A - mean A)(log_prob - mean log_prob);   candidates: cov_low < cov < cov_high, not clipped
    max(floor(fraction tokens), 1) candidates, drawn by (seed, update, sample, position), get corr = 0

Means, counts and draws are over the optimizer batch on all ranks, never a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.counter_random import random_bits, shifted
from fastrl.algorithms.losses.base import TokenLoss, check_clips, clipped, indicator, ratio
from fastrl.algorithms.losses.selected import Address, covariance, number_of_picks
from fastrl.algorithms.registry import register_policy_loss
from fastrl.algorithms.selection import Reduce, pick


def select(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    sample_id: Tensor,
    seed: int = 0,
    update: int = 0,
    reduce: Reduce | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """The tokens that get corr = 0: [T] bool. Detached [T] tensors of this rank's part of the optimizer batch.

    Args:
        cu_seqlens: [S+1]; sample_id: [S], unique over all ranks.
        seed, update: address of the draws. reduce: sums a tensor over ranks.
    """
    mask = loss_mask.bool()
    cov = covariance(advantages, log_prob, mask, reduce)
    _, stats = clipped(ratio(log_prob, old_log_prob), advantages, clip_low, clip_high)
    cut = (stats["clip_high"] + stats["clip_low"]) > 0
    candidates = mask & ~cut & (cov > cov_low) & (cov < cov_high)
    address = Address(sample_id, cu_seqlens)

    def lottery(index: Tensor) -> tuple[Tensor, int]:
        return shifted(random_bits(seed, update, address.sample(index), address.position(index)), 32), 32

    return pick([lottery, *address.order()], candidates, number_of_picks(mask, fraction, reduce), reduce=reduce)


def check(*, clip_low: float, clip_high: float, fraction: float, cov_low: float, cov_high: float) -> str | None:
    if not 0 < fraction <= 1:
        return f"fraction = {fraction} must be above 0 and at most 1"
    if not cov_low < cov_high:
        return f"cov_low = {cov_low} must be below cov_high = {cov_high}"
    return check_clips(clip_low, clip_high)


@register_policy_loss("clip_cov", level="batch", needs=("pre_update_pass",), select=select, check=check)
def clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    selection: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Clipped surrogate without the selected tokens; log_prob, old_log_prob, advantages [T], selection [T] bool."""
    loss, stats = clipped(ratio(log_prob, old_log_prob), advantages, clip_low, clip_high)
    dropped = selection.bool()
    stats["selected_fraction"] = indicator(dropped, loss)
    return TokenLoss(torch.where(dropped, torch.zeros_like(loss), loss), stats)
