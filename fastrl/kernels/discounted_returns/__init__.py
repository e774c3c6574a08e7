"""Discounted reward-to-go with the carry through masked tokens."""

from __future__ import annotations

import torch

from ..checks import check_float, check_layout, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .cpu import discounted_returns_cpu
from .reference import discounted_returns_reference


def _fake(
    rewards: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, gamma: float
) -> torch.Tensor:
    return rewards.new_empty(rewards.shape, dtype=accumulate_dtype(rewards))


_op = define_op(
    "discounted_returns",
    "(Tensor rewards, Tensor? mask, Tensor? cu_seqlens, float gamma) -> Tensor",
    reference=discounted_returns_reference,
    cpu=discounted_returns_cpu,
    kernel="fastrl.kernels.discounted_returns.kernel:discounted_returns_triton",
    fake=_fake,
)


def discounted_returns(
    rewards: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    gamma: float,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reward-to-go of every trained token.

        R_t = r_t + gamma R'      with R' of the next trained token, 0 behind the last

    Rewards at masked tokens are ignored and a masked token does not discount. Data, not a loss: no gradient flows.

    Args:
        rewards: [T] or [B, T] float.
        mask: like rewards, nonzero where the policy sampled the token; None: everywhere.
        gamma: discount in [0, 1].
        cu_seqlens: [S+1] int32 or int64 offsets of the ragged layout; None: the layout is [B, T].

    Returns:
        returns shaped like rewards, float32 (float64 if rewards is); 0 where masked.

    Raises:
        ValueError: a shape, dtype, device or value that is not allowed.
    """
    check_tensor("discounted_returns", "rewards", rewards, ndim=(1, 2))
    check_mask("discounted_returns", mask, rewards)
    check_layout("discounted_returns", "rewards", rewards, cu_seqlens)
    gamma = check_float("discounted_returns", "gamma", gamma, low=0, high=1)
    return _op(rewards.detach(), mask, cu_seqlens, gamma)
