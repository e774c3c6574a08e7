"""Advantage estimators, one file each; importing the package registers them."""

from fastrl.algorithms.advantages import (
    gae,
    gdpo,
    gpg,
    grpo,
    max_rl,
    normalize,
    opo,
    optimal_token_baseline,
    pass_at_k,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)

__all__ = [
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "max_rl",
    "normalize",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
]
