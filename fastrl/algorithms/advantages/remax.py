"""ReMax: the greedy response of the same prompt is the baseline.  https://arxiv.org/abs/2310.10505

R_t = sum_{u >= t} r_u m_u;   A_t = (R_t - score of the greedy response) m_t;   returns = R
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.ragged import spread, zero_masked
from fastrl.algorithms.registry import register_advantage
from fastrl.kernels import discounted_returns


@register_advantage("remax", level="token", needs=("greedy_scores",))
def remax(
    token_level_rewards: Tensor, response_mask: Tensor, cu_seqlens: Tensor, greedy_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Reward-to-go less the greedy score.

    Args:
        token_level_rewards: [T] float; response_mask: [T] bool; cu_seqlens: [S+1].
        greedy_scores: [S] float, the score of the greedy response to the sample's prompt.

    Returns:
        advantages [T], returns [T].
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0, cu_seqlens=cu_seqlens)
    baseline = spread(greedy_scores, cu_seqlens, returns.numel())
    return zero_masked(returns - baseline, response_mask), returns
