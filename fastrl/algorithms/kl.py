"""KL to a reference, estimated from the sampled token: x = log_prob - ref_log_prob.  http://joschu.net/blog/kl-approx.html

    k1 (kl)         x
    abs             |x|
    k2 (mse)        x^2 / 2
    k3 (low_var_kl) clamp(e^y - y - 1, -10, 10), y = clamp(-x, -20, 20)
    KIND+           the value of KIND with the gradient of k2 (https://arxiv.org/abs/2512.21852)
    full            sum_v p_v (log p_v - log q_v), where both heads' logits are at hand

k1 has no expected gradient as a loss and k3 follows the forward KL; `k2` or a `+` kind has the reverse KL's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.algorithms.registry import register_kl
from fastrl.kernels import kl_divergence

__all__ = ["AdaptiveKL", "FixedKL", "full_kl", "kl_divergence", "unbiased_kl"]

KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


def estimator(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The function (log_prob [T], ref_log_prob [T]) -> KL per token [T] of one kind."""

    def kl(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
        return kl_divergence(log_prob, ref_log_prob, kind=kind)

    kl.__name__ = kl.__qualname__ = f"kl_{kind}"
    kl.__doc__ = f"KL per token, estimator {kind}."
    return kl


for _kind in KINDS:
    for _name in (_kind, f"{_kind}+"):
        register_kl(_name)(estimator(_name))


def unbiased_kl(kl: Tensor, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """kl_t rho_t with rho = exp(clamp(log_prob - old_log_prob, -20, 20)): the KL under the current policy's samples.

    All [T]; the gradient goes through the ratio too. https://arxiv.org/abs/2512.02556
    """
    return kl * (log_prob - old_log_prob).clamp(-20, 20).exp()


@register_kl("full", needs=("logits",))
def full_kl(logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) of each row: logits [N, V] of both models -> [N] float32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits.to(wide) / temperature, -1)
    log_q = torch.log_softmax(ref_logits.to(wide) / temperature, -1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p)).sum(-1)


class FixedKL:
    """A coefficient that never changes."""

    def __init__(self, coef: float) -> None:
        self.value = check_coefficient(coef)

    def update(self, kl: float, num_sequences: int) -> float:
        """The coefficient, unchanged."""
        return self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKL(FixedKL):
    """beta <- beta (1 + clip(KL/target - 1, -0.2, 0.2) B / horizon).  https://arxiv.org/abs/1909.08593

    `value` before `update` serves the current step; B is the number of sequences of the step, KL the mean over them of
    their masked means.
    """

    def __init__(self, coef: float, *, target: float = 0.1, horizon: float = 10000.0) -> None:
        super().__init__(coef)
        if target <= 0 or horizon <= 0:
            raise ValueError(f"adaptive KL: target = {target} and horizon = {horizon} must be positive")
        self.target, self.horizon = target, horizon

    def update(self, kl: float, num_sequences: int) -> float:
        """Move the coefficient by the KL just measured; returns the new one. A non-finite KL changes nothing."""
        if math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * num_sequences / self.horizon
        return self.value


def check_coefficient(coef: float) -> float:
    if not coef >= 0:
        raise ValueError(f"KL coefficient = {coef} must not be negative")
    return float(coef)
