"""PF-PPO: resample the rollout batch by reward before the updates.  https://arxiv.org/abs/2409.06957

pow         weight |s|^power
max_min     weight 1 for the best and the worst scores, 0 for the others
max_random  weight 0.4 for the best scores, 0.1 for the others
slot j takes the sample where the cumulated weights pass u_j = uniform(seed, update, j)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fastrl.algorithms.counter_random import uniform

Mode = Literal["pow", "max_min", "max_random"]


def resampling_weights(
    scores: Tensor, valid: Tensor | None = None, *, mode: Mode = "pow", power: float = 2.0
) -> Tensor:
    """How often each sample is wanted: scores [S] float, valid [S] bool -> [S] float64, 0 for invalid samples.

    When no sample has a weight, all valid ones get 1.
    """
    ok = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    s = torch.where(ok, scores.double(), 0.0)
    best = s == torch.where(ok, s, -torch.inf).amax() if s.numel() else ok
    if mode == "pow":
        weights = s.abs().pow(power)
    elif mode == "max_min":
        worst = s == torch.where(ok, s, torch.inf).amin() if s.numel() else ok
        weights = (best | worst).double()
    elif mode == "max_random":
        weights = torch.where(best, torch.full_like(s, 0.4), torch.full_like(s, 0.1))
    else:
        raise ValueError(f"PF-PPO: mode = {mode!r} is none of pow, max_min, max_random")
    weights = torch.where(ok, weights, 0.0)
    return torch.where(weights.sum() > 0, weights, ok.double())


def resample(
    scores: Tensor,
    valid: Tensor | None = None,
    *,
    seed: int,
    update: int,
    mode: Mode = "pow",
    power: float = 2.0,
    count: int | None = None,
) -> Tensor:
    """Indices into the samples of all ranks, drawn with replacement in proportion to their weights.

    Args:
        scores: [S] float, all ranks' samples in the order of their ids; valid: [S] bool.
        seed, update: address of the draws. count: how many; None draws as many as there are samples.

    Returns:
        [count] int64; empty when no sample is valid.
    """
    weights = resampling_weights(scores, valid, mode=mode, power=power)
    total = weights.cumsum(0)
    if not weights.numel() or not bool(total[-1] > 0):
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    slots = torch.arange(scores.numel() if count is None else count, device=scores.device)
    index = torch.searchsorted(total, uniform(seed, update, slots) * total[-1], right=True)
    last = weights.nonzero()[-1, 0]
    return torch.minimum(index, last)
