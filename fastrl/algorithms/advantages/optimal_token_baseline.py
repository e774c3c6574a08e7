"""Optimal token baseline: at each position the baseline that minimises the gradient variance.

    w_t = (1 - 2 p_t + sum_v p_v^2) [x rollout_weight^2],   p_t = exp(old_log_prob);   W_t = sum_{u <= t} w_u m_u
    R_t = sum_{u >= t} r_u m_u
    B_t = sum_i R W / (sum_i W + 1e-8)        over the group's responses that reach position t
    A_t = (R_t - B_t) m_t;   returns = R

Positions count trained tokens (m = 1), so tool text does not shift them. A group of one gets 0. The part of a strictly
longest response that no other response reaches has baseline 0. https://proceedings.mlr.press/v306/li26hy.html
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.groups import group_max, group_sum
from fastrl.algorithms.ragged import cumulative_sum, sequence_count, sequence_index, trained_position, zero_masked
from fastrl.algorithms.registry import register_advantage
from fastrl.kernels import discounted_returns


@register_advantage("optimal_token_baseline", level="token", needs=("old_log_prob", "sum_sq"))
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    group_id: Tensor,
    old_log_prob: Tensor,
    sum_sq: Tensor,
    rollout_weight: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Reward-to-go less a baseline for each position of a group; the groups must be whole.

    Args:
        token_level_rewards, old_log_prob, sum_sq, rollout_weight: [T] float; response_mask: [T] bool.
        cu_seqlens: [S+1]; group_id: [S] int; valid: [S] bool.

    Returns:
        advantages [T], returns [T].
    """
    owner = sequence_index(cu_seqlens, response_mask.numel())
    counted = response_mask.bool() if valid is None else response_mask.bool() & valid.bool()[owner]
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0, cu_seqlens=cu_seqlens)
    energy = 1.0 - 2.0 * zero_masked(old_log_prob, counted).exp() + zero_masked(sum_sq, counted)
    if rollout_weight is not None:
        energy = energy * zero_masked(rollout_weight, counted).square()
    w = cumulative_sum(energy, counted, cu_seqlens).double()

    lengths = sequence_count(counted, cu_seqlens)
    ids, index = torch.unique(group_id, return_inverse=True)
    size = group_sum((lengths > 0).double(), index, ids.numel())
    reach = shared_length(lengths, index, ids.numel())
    place = trained_position(counted, cu_seqlens)
    width = max(int(lengths.max()), 1) if lengths.numel() else 1
    cell = torch.where(counted, index[owner] * width + place, ids.numel() * width)

    def over_group(x: Tensor) -> Tensor:
        sums = torch.zeros(ids.numel() * width + 1, dtype=torch.float64, device=x.device)
        return sums.index_add(0, cell, zero_masked(x, counted))[cell]

    baseline = over_group(returns.double() * w) / (over_group(w) + epsilon)
    baseline = torch.where(place < reach[owner], baseline, 0.0)
    advantages = returns.double() - baseline
    keep = counted & (size[owner] > 1)
    return torch.where(keep, advantages, 0.0).to(returns.dtype), returns


def shared_length(lengths: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Up to which position each response has company: the group's second-longest length for a strictly longest one, its
    own length for the others: [S] float64."""
    lengths = lengths.double()
    longest = group_max(lengths, index, num_groups)
    at_top = lengths == longest
    alone = group_sum(at_top.double(), index, num_groups) == 1
    second = group_max(torch.where(at_top, -torch.ones_like(lengths), lengths), index, num_groups).clamp(min=0)
    return torch.where(at_top & alone, second, lengths)
