"""Advantage estimators, one file each; importing the package registers them."""

from fastrl.algorithms.advantages import (
    gae,
    grpo,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)

__all__ = [
    "gae",
    "grpo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
]
