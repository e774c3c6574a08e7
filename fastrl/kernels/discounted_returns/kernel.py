"""Discounted reward-to-go in Triton: the affine scan without values."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..scan_kernel import launch_scan


def discounted_returns_triton(
    rewards: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, gamma: float
) -> torch.Tensor:
    """Same arguments and results as `discounted_returns_reference`."""
    check_cu_seqlens_values("discounted_returns", cu_seqlens, rewards.numel())
    return launch_scan(rewards, None, mask, None, None, cu_seqlens, gamma, 1.0)[0]
