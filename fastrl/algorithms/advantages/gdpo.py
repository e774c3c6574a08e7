"""GDPO: every reward component is normalised in its group on its own, then they are added.  https://arxiv.org/abs/2601.05242

    A_i = sum_k w_k (c_ki - mean_g(c_k)) / (std_g(c_k) + epsilon),   then whitened over the tokens of the batch

A sample that a component abstained from (NaN) has no part in that component's statistics and gets 0 from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.algorithms.options import nearest
from fastrl.algorithms.registry import register_advantage
from fastrl.errors import ConfigError
from fastrl.kernels import group_normalize


@register_advantage("gdpo", level="sequence", needs=("components",), whiten=True)
def gdpo(
    components: dict[str, Tensor],
    group_id: Tensor,
    valid: Tensor | None = None,
    *,
    weights: dict[str, float] | None = None,
    std_normalize: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """Weighted sum of group-normalised components, unwhitened.

    Args:
        components: name -> [S] float, NaN where a component abstained; group_id: [S] int; valid: [S] bool.
        weights: component -> weight; those not named take no part. None gives each a weight of 1 (a run takes
            reward.weights for it).

    Returns:
        advantages [S].

    Raises:
        ConfigError: weights name a component that no reward function returns.
    """
    chosen = dict.fromkeys(components, 1.0) if weights is None else weights
    for name in chosen:
        if name not in components:
            known = ", ".join(sorted(components)) or "none"
            raise ConfigError(
                f"algorithm.advantage_options.weights.{name}: no reward component of that name"
                f"{nearest(name, components)} (components: {known})"
            )
    total = torch.zeros(group_id.shape, dtype=torch.float64, device=group_id.device)
    like = next(iter(components.values()), total)
    scale = "std" if std_normalize else "none"
    for name, weight in chosen.items():
        column = components[name]
        counts = ~column.isnan() if valid is None else valid.bool() & ~column.isnan()
        score = torch.where(counts, column, torch.zeros_like(column))
        total = total + weight * group_normalize(score, group_id, scale=scale, eps=epsilon, valid=counts).double()
    return total.to(like.dtype)
