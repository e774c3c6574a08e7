"""Statistics of the samples of one prompt: S scores, any group ids in any order, any group sizes.

Samples with valid = False count nowhere. Means and deviations are two-pass and in float64. A group whose range is at
most 1e-6 max(1, max |s|) has no spread: its deviation is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANGE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Groups:
    """Group statistics, each already given to every sample: all [S], float64 unless said."""

    valid: Tensor  # bool
    index: Tensor  # int64, dense group number
    count: Tensor  # valid samples of the group
    mean: Tensor
    minimum: Tensor
    maximum: Tensor
    no_spread: Tensor  # bool: one sample, or all equal up to rounding
    num_groups: int


def group_sum(x: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Sum over each group, given to every sample: [S] -> [S] float64."""
    return torch.zeros(num_groups, dtype=torch.float64, device=x.device).index_add(0, index, x.double())[index]


def group_max(x: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Maximum over each group, given to every sample: [S] -> [S] in the type of x."""
    low = torch.full((num_groups,), -torch.inf, dtype=x.dtype, device=x.device)
    return low.scatter_reduce(0, index, x, "amax")[index]


def group_statistics(scores: Tensor, group_id: Tensor, valid: Tensor | None = None) -> Groups:
    """Count, mean and range of each group over its valid samples."""
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    ids, index = torch.unique(group_id, return_inverse=True)
    n = ids.numel()
    s = torch.where(valid, scores, torch.zeros_like(scores)).double()
    inf = torch.full_like(s, torch.inf)
    count = group_sum(valid.double(), index, n)
    maximum = group_max(torch.where(valid, s, -inf), index, n)
    minimum = -group_max(torch.where(valid, -s, -inf), index, n)
    size = torch.maximum(maximum.abs(), minimum.abs()).clamp(min=1.0)
    return Groups(
        valid=valid,
        index=index,
        count=count,
        mean=group_sum(s, index, n) / count.clamp(min=1),
        minimum=minimum,
        maximum=maximum,
        no_spread=(count < 2) | (maximum - minimum <= RANGE_TOLERANCE * size),
        num_groups=n,
    )


def deviation(scores: Tensor, groups: Groups, ddof: int = 1) -> Tensor:
    """Standard deviation of each group, given to every sample: [S] float64; exactly 0 without spread."""
    apart = torch.where(groups.valid, scores.double() - groups.mean, 0.0)
    variance = group_sum(apart * apart, groups.index, groups.num_groups) / (groups.count - ddof).clamp(min=1)
    return torch.where(groups.no_spread, 0.0, variance.sqrt())


def only_spread(advantages: Tensor, groups: Groups, like: Tensor) -> Tensor:
    """The advantages in the type of `like`, exactly 0 for invalid samples and groups without spread."""
    return torch.where(groups.valid & ~groups.no_spread, advantages, 0.0).to(like.dtype)


def group_counts(scores: Tensor, group_id: Tensor, valid: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """How many groups have one sample, have no spread, or have no valid sample, each as (number, number of groups)."""
    ids, first = torch.unique(group_id, return_inverse=True)
    g = group_statistics(scores, group_id, valid)
    per_group = torch.zeros(ids.numel(), dtype=torch.float64, device=scores.device)
    total = torch.tensor(float(ids.numel()), dtype=torch.float64, device=scores.device)

    def number(which: Tensor) -> tuple[Tensor, Tensor]:
        return per_group.scatter_reduce(0, first, which.double(), "amax").sum(), total

    return {
        "groups_of_one": number(g.count == 1),
        "groups_without_spread": number((g.count > 1) & g.no_spread),
        "groups_without_samples": number(g.count == 0),
    }
