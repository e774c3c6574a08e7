"""Covariances, counts and addresses that selections over an optimizer batch are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.ragged import zero_masked
from fastrl.algorithms.selection import Key, Reduce, ascending, same


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


class Address:
    """Sample id and position inside the response of tokens, by flat index."""

    def __init__(self, sample_id: Tensor, cu_seqlens: Tensor) -> None:
        self.sample_id, self.cu_seqlens = sample_id.long(), cu_seqlens.long()

    def owner(self, index: Tensor) -> Tensor:
        """The sequence (0..S-1) of each token: [n] int64."""
        return torch.searchsorted(self.cu_seqlens, index, right=True) - 1

    def sample(self, index: Tensor) -> Tensor:
        """Sample id of each token: [n] int64."""
        return self.sample_id[self.owner(index)]

    def position(self, index: Tensor) -> Tensor:
        """Place of each token in its response, from 0: [n] int64."""
        return index - self.cu_seqlens[self.owner(index)]

    def order(self) -> list[Key]:
        """Keys that tell all tokens apart: by sample id, then by position."""
        return [ascending(self.sample, 48), ascending(self.position, 32)]
