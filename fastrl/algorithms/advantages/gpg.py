"""GPG: scores less their group's mean, scaled up for the samples that scored nothing.  https://arxiv.org/abs/2504.02546

A_i = alpha (s_i - mean_g) / f_norm,   alpha = B / max(number of non-zero scores, 1),   B = samples that count
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.groups import group_statistics, only_spread
from fastrl.algorithms.registry import register_advantage


def check(*, f_norm: float) -> str | None:
    return None if f_norm > 0 else f"f_norm = {f_norm} must be positive"


@register_advantage("gpg", level="sequence", check=check)
def gpg(scores: Tensor, group_id: Tensor, valid: Tensor | None = None, *, f_norm: float = 1.0) -> Tensor:
    """Scaled centred scores: scores [S] float, group_id [S] int, valid [S] bool, all ranks -> advantages [S]."""
    g = group_statistics(scores, group_id, valid)
    score = torch.where(g.valid, scores.double(), 0.0)
    alpha = g.valid.double().sum() / (score != 0).double().sum().clamp(min=1)
    return only_spread(alpha * (score - g.mean) / f_norm, g, scores)
