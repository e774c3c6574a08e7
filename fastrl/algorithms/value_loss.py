"""The critic's loss, clipped around the values before the update.  https://arxiv.org/abs/1707.06347

    l = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

With huber_delta h the squares become h-Huber losses: x^2 inside |x| <= h, 2 h |x| - h^2 outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss, indicator
from fastrl.kernels import clipped_value_loss


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    value_clip: float | None = 0.5,
    huber_delta: float | None = None,
) -> TokenLoss:
    """Loss of each token's value; values, old_values, returns [T] float. `aggregate` masks and divides."""
    near = values if value_clip is None else torch.clamp(values, old_values - value_clip, old_values + value_clip)
    if huber_delta is None:
        loss = clipped_value_loss(values, old_values, returns, value_clip=value_clip, reduction="none").loss
    else:
        loss = 0.5 * torch.maximum(huber(values - returns, huber_delta), huber(near - returns, huber_delta))
    with torch.no_grad():
        stats = {
            "clip": indicator((near - returns).abs() > (values - returns).abs(), values),
            "mean": values.detach(),
            "error": (values - returns).abs(),
        }
    return TokenLoss(loss, stats)


def huber(x: Tensor, delta: float) -> Tensor:
    """x^2 where |x| <= delta, 2 delta |x| - delta^2 outside."""
    return torch.where(x.abs() <= delta, x * x, 2 * delta * x.abs() - delta * delta)
