"""PPO's clipped surrogate, with clip-higher and dual clip.  https://arxiv.org/abs/1707.06347

    l = max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)),   and where A < 0: l = min(l, -A dual_clip)

clip_high above clip_low is DAPO's clip-higher (https://arxiv.org/abs/2503.14476), dual_clip is from
https://arxiv.org/abs/1912.09729. Option delta caps rho in the unclipped branch (https://arxiv.org/abs/2505.07291).
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, check_clips
from fastrl.algorithms.registry import register_policy_loss
from fastrl.kernels import clipped_policy_loss


def check(
    *, clip_low: float, clip_high: float, dual_clip: float | None, delta: float | None, **_: object
) -> str | None:
    if delta is not None and not delta >= 1 + clip_high:
        return f"delta = {delta} must be at least 1 + clip_high = {1 + clip_high}, or null for none"
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
    loss, stats = clipped_policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        max_ratio=delta,
        reduction="none",
    )
    return TokenLoss(loss, {"dual_clip" if name == "clip_dual" else name: value for name, value in stats.items()})
