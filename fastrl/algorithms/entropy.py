"""Entropy: an adaptive bonus, and training on the most uncertain tokens only.

Adaptive bonus (https://arxiv.org/abs/2505.22312): coef <- max(0, coef +- step), up where the measured entropy is below
the target and down where it is above; the bonus acts only while the entropy is not above the target.
Top-entropy tokens (https://arxiv.org/abs/2506.01939): keep the fraction q of the optimizer batch's tokens with the
highest entropy.
"""

from __future__ import annotations

import math

from torch import Tensor

from fastrl.algorithms.selection import Reduce, at_least_kth, same


class AdaptiveEntropy:
    """The coefficient of the entropy bonus, steered so that the entropy does not fall below `target` nats."""

    def __init__(self, coef: float, *, target: float, step: float = 0.005, max_coef: float = 1.0) -> None:
        if not (coef >= 0 and target >= 0 and step > 0 and max_coef >= coef):
            raise ValueError(
                f"adaptive entropy: coef = {coef}, target = {target}, step = {step}, max_coef = {max_coef}: "
                "need 0 <= coef <= max_coef, target >= 0, step > 0"
            )
        self.coef, self.target, self.step, self.max_coef = coef, target, step, max_coef
        self.above_target = False

    @property
    def value(self) -> float:
        """The coefficient that serves the current step."""
        return 0.0 if self.above_target else self.coef

    def update(self, entropy: float) -> float:
        """Take in the mean token entropy of a step in nats; returns the new coefficient. NaN changes nothing."""
        if math.isfinite(entropy):
            moved = self.coef + (self.step if entropy < self.target else -self.step)
            self.coef = min(max(moved, 0.0), self.max_coef)
            self.above_target = entropy > self.target
        return self.value

    def state_dict(self) -> dict[str, float | bool]:
        return {"coef": self.coef, "above_target": self.above_target}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        self.coef, self.above_target = float(state["coef"]), bool(state["above_target"])


def top_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float, *, reduce: Reduce | None = None) -> Tensor:
    """mask & (entropy >= the k-th largest entropy), k = ceil(fraction x tokens of the optimizer batch on all ranks).

    Args:
        entropy: [T] float, from a no-gradient pass at the start of the optimizer batch.
        mask: [T] bool, the loss mask of the optimizer batch.
        fraction: in (0, 1]; tokens that tie with the k-th stay too.
        reduce: sums a tensor over ranks; None when there is one.

    Returns:
        [T] bool.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"entropy quantile: fraction = {fraction} must be above 0 and at most 1")
    mask = mask.bool()
    total = (reduce or same)(mask.double().sum().reshape(1))[0]
    k = (fraction * total - 1e-9).ceil().clamp(min=1)
    return at_least_kth(entropy, mask, k, reduce=reduce)
