"""RLOO: the baseline of a sample is the mean of the other samples of its prompt.  https://arxiv.org/abs/2402.14740

A_i = (s_i - mean_g) n/(n-1) = s_i - mean of the others;   a group of one gets 0
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.registry import register_advantage
from fastrl.kernels import group_normalize


@register_advantage("rloo", level="sequence")
def rloo(scores: Tensor, group_id: Tensor, valid: Tensor | None = None) -> Tensor:
    """Leave-one-out advantages: scores [S] float, group_id [S] int, valid [S] bool -> advantages [S]."""
    return group_normalize(scores, group_id, scale="none", baseline="leave_one_out", valid=valid)
