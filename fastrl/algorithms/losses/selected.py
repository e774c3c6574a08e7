"""Covariances, counts and addresses that selections over an optimizer batch are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.ragged import sequence_index, zero_masked
from fastrl.algorithms.selection import Reduce, same


def covariance(advantages: Tensor, log_prob: Tensor, mask: Tensor, reduce: Reduce | None) -> Tensor:
    """(A - mean A)(log_prob - mean log_prob), means over the mask on all ranks: [T] float64, 0 where masked."""
    a, x = zero_masked(advantages.detach(), mask).double(), zero_masked(log_prob.detach(), mask).double()
    sums = (reduce or same)(torch.stack([a.sum(), x.sum(), mask.double().sum()]))
    mean = sums[:2] / sums[2].clamp(min=1)
    return zero_masked((a - mean[0]) * (x - mean[1]), mask)


def number_of_picks(mask: Tensor, fraction: float, reduce: Reduce | None) -> Tensor:
    """max(floor(fraction x unmasked tokens on all ranks), 1): 0-d float64."""
    total = (reduce or same)(mask.double().sum().reshape(1))[0]
    return (fraction * total + 1e-9).floor().clamp(min=1)


def address(sample_id: Tensor, cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Sample id and position inside the response of each token: [T] int64 both."""
    owner = sequence_index(cu_seqlens, num_tokens)
    position = torch.arange(num_tokens, device=cu_seqlens.device) - cu_seqlens[:-1].long()[owner]
    return sample_id.long()[owner], position
