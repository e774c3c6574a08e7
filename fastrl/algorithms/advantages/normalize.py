"""Centre and scale scores over the group, the whole batch, or not at all, each chosen on its own.

    A_i = (s_i - mean) / (std + epsilon)

mean_level and std_level say over which samples mean and std are taken; the std is around the mean of its own level.
Group mean with batch std is the pair of https://arxiv.org/abs/2508.08221.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fastrl.algorithms.groups import Groups, deviation, group_statistics
from fastrl.algorithms.registry import register_advantage

Level = Literal["group", "batch", "none"]


@register_advantage("normalize", level="sequence")
def normalize(
    scores: Tensor,
    group_id: Tensor,
    valid: Tensor | None = None,
    *,
    mean_level: Level = "group",
    std_level: Level = "group",
    leave_one_out: bool = False,
    ddof: Literal[0, 1] = 1,
    epsilon: float = 1e-6,
) -> Tensor:
    """Normalised scores: scores [S] float, group_id [S] int, valid [S] bool, all ranks -> advantages [S].

    leave_one_out: the mean of a sample leaves out the sample itself. Where a level in use has one sample or no spread,
    the advantage is 0.
    """
    levels = {
        "group": group_statistics(scores, group_id, valid),
        "batch": group_statistics(scores, torch.zeros_like(group_id), valid),
    }
    ok = levels["group"].valid
    out = torch.where(ok, scores.double(), 0.0)
    dead = ~ok
    if mean_level != "none":
        out, dead = out - mean_of(out, levels[mean_level], leave_one_out), dead | levels[mean_level].no_spread
    if std_level != "none":
        clean = torch.where(ok, scores.double(), 0.0)
        out = out / (deviation(clean, levels[std_level], ddof) + epsilon)
        dead = dead | levels[std_level].no_spread
    return torch.where(dead, 0.0, out).to(scores.dtype)


def mean_of(score: Tensor, level: Groups, leave_one_out: bool) -> Tensor:
    """Mean of each sample's level, without the sample itself if asked for: [S] float64."""
    if not leave_one_out:
        return level.mean
    return (level.mean * level.count - score) / (level.count - 1).clamp(min=1)
