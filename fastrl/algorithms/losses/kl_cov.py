"""KL-Cov: tokens with the highest covariance of log-prob and advantage are held back.  https://arxiv.org/abs/2505.22617

    l = -A rho,   + coef |d| for the max(floor(fraction tokens), 1) tokens with the largest
    cov_t = (A - mean A)(log_prob - mean log_prob)

Means, counts and the choice are over the optimizer batch on all ranks; equal covariances go by sample id and position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, indicator, log_ratio
from fastrl.algorithms.losses.selected import Address, covariance, number_of_picks
from fastrl.algorithms.registry import register_policy_loss
from fastrl.algorithms.selection import Reduce, descending, pick


def select(
    log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    sample_id: Tensor,
    reduce: Reduce | None = None,
    *,
    fraction: float = 2e-4,
) -> Tensor:
    """The tokens that get the penalty: [T] bool. Detached [T] tensors of this rank's part of the optimizer batch.

    Args:
        cu_seqlens: [S+1]; sample_id: [S], unique over all ranks. reduce: sums a tensor over ranks.
    """
    mask = loss_mask.bool()
    cov = covariance(advantages, log_prob, mask, reduce)
    keys = [descending(cov), *Address(sample_id, cu_seqlens).order()]
    return pick(keys, mask, number_of_picks(mask, fraction, reduce), reduce=reduce)


def check(*, fraction: float, coef: float) -> str | None:
    if not 0 < fraction <= 1:
        return f"fraction = {fraction} must be above 0 and at most 1"
    return None if coef >= 0 else f"coef = {coef} must not be negative"


@register_policy_loss("kl_cov", level="batch", needs=("pre_update_pass",), select=select, check=check)
def kl_cov(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, selection: Tensor, *, coef: float = 0.1
) -> TokenLoss:
    """Surrogate with a penalty on the selected tokens; log_prob, old_log_prob, advantages [T], selection [T] bool."""
    d = log_ratio(log_prob, old_log_prob)
    rho = d.exp()
    penalty = torch.where(selection.bool(), coef * d.abs(), torch.zeros_like(d))
    stats = {"selected_fraction": indicator(selection.bool(), d), "ratio": rho.detach()}
    return TokenLoss(-advantages * rho + penalty, stats)
