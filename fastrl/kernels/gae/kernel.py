"""Generalised advantage estimation in Triton: the affine scan with values."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..scan_kernel import launch_scan


def gae_triton(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    bootstrap_values: torch.Tensor | None,
    lambda_per_sequence: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as `gae_reference`."""
    check_cu_seqlens_values("gae", cu_seqlens, rewards.numel())
    advantages, returns = launch_scan(
        rewards, values, mask, bootstrap_values, lambda_per_sequence, cu_seqlens, gamma, gae_lambda
    )
    assert returns is not None
    return advantages, returns
