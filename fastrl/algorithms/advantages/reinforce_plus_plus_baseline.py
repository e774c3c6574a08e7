"""REINFORCE++ with the group's mean as baseline, whitened over the tokens of the batch.  https://arxiv.org/abs/2501.03262

b_i = s_i - mean_g, given to every token of the response;   A = whiten(b)
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.registry import register_advantage
from fastrl.kernels import group_normalize


@register_advantage("reinforce_plus_plus_baseline", level="sequence", whiten=True)
def reinforce_plus_plus_baseline(scores: Tensor, group_id: Tensor, valid: Tensor | None = None) -> Tensor:
    """Scores less their group's mean, unwhitened: scores [S] float, group_id [S] int, valid [S] bool -> [S]."""
    return group_normalize(scores, group_id, scale="none", baseline="mean", valid=valid)
