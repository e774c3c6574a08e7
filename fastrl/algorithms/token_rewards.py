"""From one score per response to one reward per token, in the order: score placed, then KL in the reward.

r_t = token_level_scores_t - beta kl_t m_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.ragged import last_unmasked, sequence_index, zero_masked


def place_scores(scores: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each score on the last sampled token of its response: scores [S] -> [T]; a response without one gets nothing."""
    last = last_unmasked(response_mask, cu_seqlens)
    out = scores.new_zeros(response_mask.numel())
    has = last >= 0
    return out.index_put((last[has],), scores[has])


def move_to_sampled(token_scores: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards given on tokens that were not sampled, moved to the last sampled token at or before them.

    Args:
        token_scores: [T] float, rewards per token as an environment gave them.
        response_mask: [T] bool, True = sampled by the policy.
        cu_seqlens: [S+1].

    Returns:
        rewards [T], the number of rewards that moved, the number that no sampled token precedes (they are dropped).
    """
    mask = response_mask.bool()
    flat = torch.where(mask, torch.arange(mask.numel(), device=mask.device), -1)
    target = flat.cummax(0).values if flat.numel() else flat
    start = cu_seqlens[:-1][sequence_index(cu_seqlens, mask.numel())]
    lost = target < start
    outside = (token_scores != 0) & ~mask
    kept = torch.where(lost, torch.zeros_like(token_scores), token_scores)
    moved = torch.zeros_like(token_scores).index_add(0, target.clamp(min=0), kept)
    return moved, (outside & ~lost).sum(), (outside & lost).sum()


def kl_in_reward(token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, *, beta: float | Tensor) -> Tensor:
    """r_t = token_level_scores_t - beta kl_t m_t; all [T], kl per token between the old policy and the reference."""
    return token_level_scores - beta * zero_masked(kl, response_mask)
