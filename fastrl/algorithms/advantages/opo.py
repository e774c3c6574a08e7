"""OPO: the baseline is the group's mean score weighted by response length.  https://arxiv.org/abs/2505.23585

A_i = s_i - sum(L s) / sum(L)        over the group;   a group of one and a group without spread get 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.groups import group_statistics, group_sum, only_spread
from fastrl.algorithms.registry import register_advantage


@register_advantage("opo", level="sequence")
def opo(scores: Tensor, group_id: Tensor, lengths: Tensor, valid: Tensor | None = None) -> Tensor:
    """Scores less their length-weighted group mean: scores [S] float, lengths [S] sampled tokens -> advantages [S]."""
    g = group_statistics(scores, group_id, valid)
    weight = torch.where(g.valid, lengths.double(), 0.0)
    score = torch.where(g.valid, scores.double(), 0.0)
    total = group_sum(weight, g.index, g.num_groups)
    baseline = group_sum(weight * score, g.index, g.num_groups) / total.clamp(min=1)
    return only_spread(score - torch.where(total > 0, baseline, g.mean), g, scores)
