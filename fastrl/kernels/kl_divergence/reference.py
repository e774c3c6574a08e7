"""Estimators of the KL divergence of sampled tokens, and their derivatives, in plain torch.

With x = log_prob - ref_log_prob of a token that the policy sampled:

    k1   x                                     abs  |x|
    k2   x^2 / 2                               k3   clamp(e^y - y - 1, -10, 10),  y = clamp(-x, -20, 20)
"""

from __future__ import annotations

import torch

from ..dispatch import accumulate_dtype

VALUES = ("k1", "abs", "k2", "k3")
LIMIT = 20.0  # of the log ratio in k3
CAP = 10.0  # of the value of k3


def value_of(x: torch.Tensor, value: str) -> torch.Tensor:
    """The estimator at log ratio x; differentiable."""
    if value == "k1":
        return x.clone()
    if value == "abs":
        return x.abs()
    if value == "k2":
        return 0.5 * x * x
    y = (-x).clamp(-LIMIT, LIMIT)
    return (torch.expm1(y) - y).clamp(-CAP, CAP)  # e^y - 1 - y loses every digit near 0


def derivative_of(x: torch.Tensor, value: str) -> torch.Tensor:
    """d estimator / d x; 0 where a clamp holds."""
    if value == "k1":
        return torch.ones_like(x)
    if value == "abs":
        return torch.where(x > 0, torch.ones_like(x), torch.where(x < 0, -torch.ones_like(x), x))
    if value == "k2":
        return x
    y = (-x).clamp(-LIMIT, LIMIT)
    held = (x.abs() > LIMIT) | (torch.expm1(y) - y > CAP)
    return torch.where(held, torch.zeros_like(x), -torch.expm1(y))


def kl_divergence_reference(
    log_prob: torch.Tensor, ref_log_prob: torch.Tensor, value: str, gradient: str
) -> torch.Tensor:
    """The value of one estimator with the gradient of another; differentiable in both log-probs."""
    dtype = accumulate_dtype(log_prob, ref_log_prob)
    x = log_prob.to(dtype) - ref_log_prob.to(dtype)
    out = value_of(x, value)
    if gradient == value:
        return out
    through = value_of(x, gradient)
    return out.detach() + (through - through.detach())


def kl_divergence_backward_reference(
    upstream: torch.Tensor, log_prob: torch.Tensor, ref_log_prob: torch.Tensor, gradient: str
) -> torch.Tensor:
    """upstream x d/dx of the estimator whose gradient is used; 0 where upstream is 0, whatever the log-probs hold."""
    dtype = accumulate_dtype(log_prob, ref_log_prob)
    x = log_prob.to(dtype) - ref_log_prob.to(dtype)
    slope = derivative_of(x, gradient) * upstream
    return torch.where(upstream == 0, torch.zeros_like(slope), slope)
