"""PPO's clipped surrogate, with clip-higher and dual clip.  https://arxiv.org/abs/1707.06347

    l = max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)),   and where A < 0: l = min(l, -A dual_clip)

clip_high above clip_low is DAPO's clip-higher (https://arxiv.org/abs/2503.14476), dual_clip is from
https://arxiv.org/abs/1912.09729. Option delta caps rho in the unclipped branch (https://arxiv.org/abs/2505.07291).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, check_clips, indicator, ratio
from fastrl.algorithms.registry import register_policy_loss
from fastrl.kernels import clipped_policy_loss


def check(
    *, clip_low: float, clip_high: float, dual_clip: float | None, delta: float | None, **_: object
) -> str | None:
    if delta is not None and not delta > 1 + clip_high:
        return f"delta = {delta} must be above 1 + clip_high = {1 + clip_high}"
    return check_clips(clip_low, clip_high, dual_clip)


@register_policy_loss("clip", check=check)
def clip(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    delta: float | None = None,
) -> TokenLoss:
    """Clipped surrogate loss per token; log_prob, old_log_prob, advantages [T] float.

    Raises:
        ValueError: clip distances out of range.
    """
    problem = check(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, delta=delta)
    if problem:
        raise ValueError(problem)
    loss = clipped_policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        reduction="none",
    ).loss
    with torch.no_grad():
        rho = ratio(log_prob, old_log_prob)
        high = (rho > 1 + clip_high) & (advantages > 0)
        low = (rho < 1 - clip_low) & (advantages < 0)
        dual = (advantages < 0) & (rho > dual_clip) if dual_clip is not None else torch.zeros_like(high)
        stats = {
            "clip_high": indicator(high, rho),
            "clip_low": indicator(low, rho),
            "dual_clip": indicator(dual, rho),
            "ratio": rho,
        }
    if delta is not None:
        # a ratio at or above delta is only ever unclipped where A < 0: there the loss becomes the constant -A delta
        capped = (advantages < 0) & (rho >= delta)
        loss = torch.where(capped, torch.minimum(loss.detach(), -advantages * delta), loss)
        stats["delta"] = indicator(capped, rho)
    return TokenLoss(loss, stats)
