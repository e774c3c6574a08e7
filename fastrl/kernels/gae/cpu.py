"""Generalised advantage estimation on a CPU: the fast scan where it applies, the reference elsewhere."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..scan_cpu import fast_scan
from .reference import gae_reference


def gae_cpu(
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
    if lambda_per_sequence is None and rewards.numel():
        check_cu_seqlens_values("gae", cu_seqlens, rewards.numel())
        dtype = accumulate_dtype(rewards, values)
        offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
        after = None if bootstrap_values is None else bootstrap_values.to(dtype)
        found = fast_scan(rewards, values, mask, after, offsets, gamma, gamma * gae_lambda, dtype)
        if found is not None:
            advantages, returns = found
            assert returns is not None
            return advantages, returns
    return gae_reference(rewards, values, mask, bootstrap_values, lambda_per_sequence, cu_seqlens, gamma, gae_lambda)
