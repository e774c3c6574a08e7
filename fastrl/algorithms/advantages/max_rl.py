"""MaxRL: scores relative to the mean of their group, so that rare successes weigh more.  https://zanette-labs.github.io/MaxRL/

A_i = (s_i - mean_g) / mean_g;   0 where mean_g <= 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.groups import group_statistics, only_spread
from fastrl.algorithms.registry import register_advantage


@register_advantage("max_rl", level="sequence")
def max_rl(scores: Tensor, group_id: Tensor, valid: Tensor | None = None) -> Tensor:
    """Relative lead over the group's mean: scores [S] float, group_id [S] int, valid [S] bool -> advantages [S]."""
    g = group_statistics(scores, group_id, valid)
    score = torch.where(g.valid, scores.double(), 0.0)
    positive = g.mean > 0
    return only_spread(torch.where(positive, (score - g.mean) / torch.where(positive, g.mean, 1.0), 0.0), g, scores)
