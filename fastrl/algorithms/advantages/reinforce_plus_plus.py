"""REINFORCE++: discounted reward-to-go, whitened over the batch.  https://arxiv.org/abs/2501.03262

R_t = r_t + gamma R_{t+1} from the end, the carry passes through masked tokens;   A = whiten(R) m;   returns = R
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.registry import register_advantage
from fastrl.kernels import discounted_returns


@register_advantage("reinforce_plus_plus", level="token", whiten=True)
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Reward-to-go of ragged responses: token_level_rewards [T] float -> (advantages [T], returns [T])."""
    returns = discounted_returns(token_level_rewards, response_mask, gamma=gamma, cu_seqlens=cu_seqlens)
    return returns, returns
