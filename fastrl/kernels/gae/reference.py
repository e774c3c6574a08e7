"""Generalised advantage estimation in plain torch: one affine scan over the flat batch."""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..ragged import bool_mask, offsets_of, segment_ids
from ..scan import next_trained, reverse_linear_scan


def gae_reference(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    bootstrap_values: torch.Tensor | None,
    lambda_per_sequence: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The equation of `fastrl.kernels.gae`; differentiable in rewards, values and bootstrap_values."""
    check_cu_seqlens_values("gae", cu_seqlens, rewards.numel())
    dtype = accumulate_dtype(rewards, values)
    offsets = offsets_of(rewards, cu_seqlens)
    shape, total, count = rewards.shape, rewards.numel(), offsets.shape[0] - 1
    if total == 0:
        return rewards.new_zeros(shape, dtype=dtype), rewards.new_zeros(shape, dtype=dtype)
    trained = bool_mask(mask, rewards)
    segments = segment_ids(offsets, total)
    zero = torch.zeros((), dtype=dtype, device=rewards.device)
    r = torch.where(trained, rewards.reshape(-1).to(dtype), zero)
    v = torch.where(trained, values.reshape(-1).to(dtype), zero)
    after = zero.expand(count) if bootstrap_values is None else bootstrap_values.to(dtype)
    delta = torch.where(trained, r + gamma * next_trained(v, trained, offsets, segments, after) - v, zero)
    if lambda_per_sequence is None:
        decay = torch.full((), gamma * gae_lambda, dtype=dtype, device=r.device)
    else:
        decay = (gamma * lambda_per_sequence.to(dtype))[segments]
    carried = reverse_linear_scan(torch.where(trained, decay, torch.ones_like(zero)), delta, offsets)
    advantages = torch.where(trained, carried, zero)
    returns = torch.where(trained, advantages + v, zero)
    return advantages.reshape(shape), returns.reshape(shape)
