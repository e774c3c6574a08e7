"""Generalised advantage estimation (https://arxiv.org/abs/1506.02438) with carries through masked tokens."""

from __future__ import annotations

import torch

from ..checks import check_float, check_layout, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .cpu import gae_cpu
from .reference import gae_reference


def _fake(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    bootstrap_values: torch.Tensor | None,
    lambda_per_sequence: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = accumulate_dtype(rewards, values)
    return rewards.new_empty(rewards.shape, dtype=dtype), rewards.new_empty(rewards.shape, dtype=dtype)


_op = define_op(
    "gae",
    "(Tensor rewards, Tensor values, Tensor? mask, Tensor? bootstrap_values, Tensor? lambda_per_sequence, "
    "Tensor? cu_seqlens, float gamma, float gae_lambda) -> (Tensor, Tensor)",
    reference=gae_reference,
    cpu=gae_cpu,
    kernel="fastrl.kernels.gae.kernel:gae_triton",
    fake=_fake,
)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    gamma: float,
    gae_lambda: float | torch.Tensor,
    bootstrap_values: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of every trained token, from the end of its sequence to the front.

        delta_t = r_t + gamma V' - V_t,   A_t = delta_t + gamma lambda A',   returns_t = A_t + V_t

    where V' and A' belong to the next *trained* token: masked tokens pass both carries through. Behind the last trained
    token V' is the bootstrap value and A' is 0. Not whitened. Data, not a loss: no gradient flows.

    Args:
        rewards: [T] or [B, T] float, reward of each token.
        values: like rewards, value of the state before each token.
        mask: like rewards, nonzero where the policy sampled the token; None: everywhere.
        gamma: discount in [0, 1].
        gae_lambda: lambda in [0, 1], or one per sequence [S] float.
        bootstrap_values: [S] float, value of the state after a truncated response; None: 0.
        cu_seqlens: [S+1] int32 or int64 offsets of the ragged layout; None: the layout is [B, T].

    Returns:
        (advantages, returns), shaped like rewards, float32 (float64 if an input is); 0 where masked.

    Raises:
        ValueError: a shape, dtype, device or value that is not allowed.
    """
    check_tensor("gae", "rewards", rewards, ndim=(1, 2))
    check_tensor("gae", "values", values, shape=rewards.shape, device=rewards.device)
    check_mask("gae", mask, rewards)
    count = check_layout("gae", "rewards", rewards, cu_seqlens)
    gamma = check_float("gae", "gamma", gamma, low=0, high=1)
    if bootstrap_values is not None:
        check_tensor("gae", "bootstrap_values", bootstrap_values, shape=(count,), device=rewards.device)
    per_sequence = None
    if isinstance(gae_lambda, torch.Tensor):
        check_tensor("gae", "gae_lambda", gae_lambda, shape=(count,), device=rewards.device)
        per_sequence, scalar = gae_lambda.detach(), 0.0
    else:
        scalar = check_float("gae", "gae_lambda", gae_lambda, low=0, high=1)
    bootstrap = None if bootstrap_values is None else bootstrap_values.detach()
    return _op(rewards.detach(), values.detach(), mask, bootstrap, per_sequence, cu_seqlens, gamma, scalar)
