"""pass@k: only the best sample of a group is rewarded, by its lead over the second.  https://arxiv.org/abs/2503.19595

A_best = (s_max - s_2nd) [/ (std_g + epsilon)],   0 for the others;   a tie for the best gives 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.groups import deviation, group_max, group_statistics, group_sum, only_spread
from fastrl.algorithms.registry import register_advantage


@register_advantage("grpo_passk", level="sequence")
@register_advantage("pass_at_k", level="sequence")
def pass_at_k(
    scores: Tensor,
    group_id: Tensor,
    valid: Tensor | None = None,
    *,
    std_normalize: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """The lead of each group's best sample: scores [S] float, group_id [S] int, valid [S] bool -> advantages [S]."""
    g = group_statistics(scores, group_id, valid)
    score = torch.where(g.valid, scores.double(), -torch.inf)
    best = g.valid & (score == g.maximum)
    alone = group_sum(best.double(), g.index, g.num_groups) == 1
    second = group_max(torch.where(best, -torch.inf, score), g.index, g.num_groups)
    lead = g.maximum - torch.where(torch.isfinite(second), second, g.maximum)
    if std_normalize:
        lead = lead / (deviation(torch.where(g.valid, scores, 0.0), g) + epsilon)
    return only_spread(torch.where(best & alone, lead, 0.0), g, scores)
