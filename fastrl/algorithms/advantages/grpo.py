"""GRPO: group-relative advantages.  https://arxiv.org/abs/2402.03300

    A_i = (s_i - mean_g) / (std_g + epsilon)        over the samples of one prompt

std_normalize = False gives Dr. GRPO (https://arxiv.org/abs/2503.20783). A group of one and a group
without spread get 0.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fastrl.algorithms.registry import register_advantage
from fastrl.kernels import group_normalize


@register_advantage("dr_grpo", level="sequence", preset={"std_normalize": False})
@register_advantage("grpo", level="sequence")
def grpo(
    scores: Tensor,
    group_id: Tensor,
    valid: Tensor | None = None,
    *,
    std_normalize: bool = True,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    ddof: Literal[0, 1] = 1,
    epsilon: float = 1e-6,
) -> Tensor:
    """Each score relative to its group: scores [S] float, group_id [S] int, valid [S] bool -> advantages [S]."""
    scale = "std" if std_normalize else "none"
    return group_normalize(scores, group_id, scale=scale, baseline=baseline, ddof=ddof, eps=epsilon, valid=valid)
