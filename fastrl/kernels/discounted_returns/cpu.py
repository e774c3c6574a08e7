"""Discounted reward-to-go on a CPU: the fast scan where it applies, the reference elsewhere."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..scan_cpu import fast_scan
from .reference import discounted_returns_reference


def discounted_returns_cpu(
    rewards: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, gamma: float
) -> torch.Tensor:
    """Same arguments and results as `discounted_returns_reference`."""
    if rewards.numel():
        check_cu_seqlens_values("discounted_returns", cu_seqlens, rewards.numel())
        offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
        found = fast_scan(rewards, None, mask, None, offsets, gamma, gamma, accumulate_dtype(rewards))
        if found is not None:
            return found[0]
    return discounted_returns_reference(rewards, mask, cu_seqlens, gamma)
