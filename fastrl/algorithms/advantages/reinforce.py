"""REINFORCE: the score itself is the advantage, less an optional running baseline.  https://doi.org/10.1007/BF00992696

A_i = s_i - b;   after the step b <- decay b + (1 - decay) mean(s), b = the first mean to begin with
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.algorithms.registry import register_advantage


def check(*, baseline_decay: float | None, **_: object) -> str | None:
    if baseline_decay is not None and not 0 <= baseline_decay < 1:
        return f"baseline_decay = {baseline_decay} must be at least 0 and below 1"
    return None


@register_advantage("reinforce", level="sequence", check=check)
def reinforce(
    scores: Tensor,
    valid: Tensor | None = None,
    running_baseline: Tensor | None = None,
    *,
    baseline_decay: float | None = None,
) -> Tensor:
    """Scores less the baseline: scores [S] float, valid [S] bool, running_baseline [] float -> advantages [S].

    baseline_decay: null means no baseline; otherwise the trainer keeps a `RunningBaseline` with this decay.
    """
    advantages = scores if running_baseline is None or baseline_decay is None else scores - running_baseline
    return advantages if valid is None else torch.where(valid.bool(), advantages, torch.zeros_like(advantages))


class RunningBaseline:
    """An exponential mean of the batch means of the scores; 0 before the first update."""

    def __init__(self, decay: float) -> None:
        self.decay, self.value, self.num_updates = decay, 0.0, 0

    def update(self, mean_score: float) -> float:
        """Take in the mean score of a step (all ranks); returns the new baseline. A non-finite mean changes nothing."""
        if math.isfinite(mean_score):
            first = self.num_updates == 0
            self.value = mean_score if first else self.decay * self.value + (1 - self.decay) * mean_score
            self.num_updates += 1
        return self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.num_updates = float(state["value"]), int(state["num_updates"])
