"""What every policy loss returns and shares.

A loss is a function of [T] tensors. It never masks, weights or divides: `Entry.call` zeroes what is masked before the
loss sees it, the trainer multiplies by the correction weight and the aggregation scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far outside any trust region, still finite when squared in float32


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token and numbers about it. `stats` are detached [T] floats whose masked mean is logged."""

    loss: Tensor  # [T], with gradient
    stats: dict[str, Tensor] = field(default_factory=dict)


def log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """d = clamp(log_prob - old_log_prob, -20, 20), [T]."""
    return (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """rho = exp(d), [T]."""
    return log_ratio(log_prob, old_log_prob).exp()


def choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers for each token, in the type of `like`: [T]."""
    return torch.where(condition, torch.full_like(like, yes), torch.full_like(like, no))


def indicator(condition: Tensor, like: Tensor) -> Tensor:
    """1 where True, 0 elsewhere, in the type of `like`, without gradient."""
    return condition.detach().to(like.dtype)


def clipped(rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)) and where the clipped branch won; all [T]."""
    plain = -advantages * rho
    bounded = -advantages * rho.clamp(1.0 - clip_low, 1.0 + clip_high)
    won = bounded > plain
    stats = {
        "clip_high": indicator(won & (rho > 1.0 + clip_high), rho),
        "clip_low": indicator(won & (rho < 1.0 - clip_low), rho),
        "ratio": rho.detach(),
    }
    return torch.maximum(plain, bounded), stats


def check_clips(
    clip_low: float | None = None, clip_high: float | None = None, dual_clip: float | None = None
) -> str | None:
    """What is wrong with clip distances: 0 <= clip_low < 1, clip_high >= 0, dual_clip > 1."""
    if clip_low is not None and not 0 <= clip_low < 1:
        return f"clip_low = {clip_low} must be at least 0 and below 1 (the ratio is clipped at 1 - clip_low)"
    if clip_high is not None and not clip_high >= 0:
        return f"clip_high = {clip_high} must not be negative"
    if dual_clip is not None and not dual_clip > 1:
        return f"dual_clip = {dual_clip} must be above 1, or null for none"
    return None
