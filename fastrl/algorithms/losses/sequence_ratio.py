"""Policy ratios of whole sequences, spread over their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.losses.base import log_ratio
from fastrl.algorithms.ragged import sequence_mean, spread


def mean_log_ratio(log_prob: Tensor, old_log_prob: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """sum(d m) / max(L, 1) of each sequence, given to its tokens: [T], with gradient."""
    d = log_ratio(log_prob, old_log_prob)
    return spread(sequence_mean(d, loss_mask, cu_seqlens), cu_seqlens, d.numel())


def own_token_ratio(
    log_prob: Tensor, old_log_prob: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, max_log_ratio: float = 10.0
) -> Tensor:
    """exp(log_prob - sg(log_prob) + sg(s)), s the mean log ratio: [T], the sequence's value, each token's gradient."""
    s = mean_log_ratio(log_prob.detach(), old_log_prob, loss_mask, cu_seqlens)
    return torch.exp((log_prob - log_prob.detach() + s).clamp(max=max_log_ratio))
