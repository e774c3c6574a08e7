"""The critic's loss, clipped around the values before the update.  https://arxiv.org/abs/1707.06347

l = max(h(v - R), h(clip(v, v_old - c, v_old + c) - R)),   h(x) = x^2 / 2, or Huber's function with huber_delta
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.losses.base import TokenLoss
from fastrl.kernels import clipped_value_loss


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    value_clip: float | None = 0.5,
    huber_delta: float | None = None,
) -> TokenLoss:
    """Loss of each token's value; values, old_values, returns [T] float. `aggregate` masks and divides.

    stats: clip (1 where the clipped square is the larger one) and abs_error, [T].
    """
    loss, stats = clipped_value_loss(
        values, old_values, returns, value_clip=value_clip, huber_delta=huber_delta, reduction="none"
    )
    return TokenLoss(loss, stats)
