"""Which groups teach something: dynamic sampling's filter.  https://arxiv.org/abs/2503.14476

A group is kept when the filter metric of its valid samples varies by more than 1e-6 max(1, max |metric|).
"""

from __future__ import annotations

from torch import Tensor

from fastrl.algorithms.groups import group_statistics


def informative_groups(metric: Tensor, group_id: Tensor, valid: Tensor | None = None) -> Tensor:
    """For each sample whether its group is kept: metric [S] float, group_id [S] int, valid [S] bool -> [S] bool."""
    return ~group_statistics(metric, group_id, valid).no_spread
