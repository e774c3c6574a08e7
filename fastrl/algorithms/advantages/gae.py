"""Generalised advantage estimation.  https://arxiv.org/abs/1506.02438

    from the end, V' = bootstrap (0), L = 0:
    delta = r_t + gamma V' - V_t;   L <- delta + gamma lambda L;   A_t = L;   V' <- V_t       where m_t = 1
    both carries pass unchanged                                                               where m_t = 0
    returns = A + V, before the whitening that the trainer does over the rollout batch

value_lambda gives the returns a lambda of their own (https://arxiv.org/abs/2503.01491); length_adaptive_lambda = alpha
makes lambda = 1 - 1/(alpha L) per response (https://arxiv.org/abs/2504.05118).
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.ragged import sequence_count
from fastrl.algorithms.registry import register_advantage
from fastrl.kernels import gae as gae_kernel


def check(*, length_adaptive_lambda: float | None, value_lambda: float | None, **_: object) -> str | None:
    if length_adaptive_lambda is not None and length_adaptive_lambda <= 0:
        return f"length_adaptive_lambda = {length_adaptive_lambda} must be positive"
    if value_lambda is not None and not 0 <= value_lambda <= 1:
        return f"value_lambda = {value_lambda} must be between 0 and 1"
    return None


@register_advantage("gae", level="token", needs=("values",), whiten=True, check=check)
def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    value_lambda: float | None = None,
    length_adaptive_lambda: float | None = None,
    bootstrap_truncated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates of ragged responses, unwhitened, and the returns the critic learns.

    Args:
        token_level_rewards, values: [T] float; response_mask: [T] bool; cu_seqlens: [S+1].
        bootstrap_values: [S] float, value of the state after the last token of a response cut by the length limit,
            0 for the others; used when bootstrap_truncated.

    Returns:
        advantages [T], returns [T]; 0 where masked.
    """
    bootstrap = bootstrap_values if bootstrap_truncated else None
    actor_lambda: float | Tensor = gae_lambda
    if length_adaptive_lambda is not None:
        lengths = sequence_count(response_mask, cu_seqlens).clamp(min=1).to(values.dtype)
        actor_lambda = (1.0 - 1.0 / (length_adaptive_lambda * lengths)).clamp(min=0.0)

    def estimate(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return gae_kernel(
            token_level_rewards,
            values,
            response_mask,
            gamma=gamma,
            gae_lambda=lam,
            bootstrap_values=bootstrap,
            cu_seqlens=cu_seqlens,
        )

    advantages, returns = estimate(actor_lambda)
    if value_lambda is not None:
        _, returns = estimate(value_lambda)
    return advantages, returns
