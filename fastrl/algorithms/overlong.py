"""Responses at the length limit: a soft penalty before it, or no part in the loss.  https://arxiv.org/abs/2503.14476

penalty(len) = -factor clip((len - (max - buffer)) / buffer, 0, 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.ragged import spread


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """What to add to the score of a response of each length: lengths [S] int -> [S] float64, between -factor and 0.

    Args:
        max_tokens: the length limit. buffer_tokens: width of the zone before it; 0 switches the penalty off.
    """
    if buffer_tokens <= 0:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=lengths.device)
    over = (lengths.double() - (max_tokens - buffer_tokens)) / buffer_tokens
    return -factor * over.clamp(0.0, 1.0)


def mask_overlong(loss_mask: Tensor, truncated: Tensor, cu_seqlens: Tensor) -> Tensor:
    """loss_mask without the responses that were cut at the limit: loss_mask [T], truncated [S] bool -> [T] bool."""
    return loss_mask.bool() & ~spread(truncated.bool(), cu_seqlens, loss_mask.numel())
