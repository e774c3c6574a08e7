"""Discounted reward-to-go in plain torch: one affine scan over the flat batch."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..ragged import bool_mask, offsets_of
from ..scan import reverse_linear_scan


def discounted_returns_reference(
    rewards: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, gamma: float
) -> torch.Tensor:
    """The equation of `fastrl.kernels.discounted_returns`; differentiable in rewards."""
    check_cu_seqlens_values("discounted_returns", cu_seqlens, rewards.numel())
    dtype = accumulate_dtype(rewards)
    trained = bool_mask(mask, rewards)
    zero = torch.zeros((), dtype=dtype, device=rewards.device)
    r = torch.where(trained, rewards.reshape(-1).to(dtype), zero)
    a = torch.where(trained, torch.full_like(zero, gamma), torch.ones_like(zero))
    carried = reverse_linear_scan(a, r, offsets_of(rewards, cu_seqlens))
    return torch.where(trained, carried, zero).reshape(rewards.shape)
