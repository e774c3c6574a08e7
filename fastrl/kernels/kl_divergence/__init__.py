"""Per-token estimators of the KL divergence (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_choice, check_tensor
from ..dispatch import accumulate_dtype, define_op, refuse_double_backward
from .cpu import kl_divergence_cpu
from .reference import kl_divergence_backward_reference, kl_divergence_reference

# kind -> (estimator of the value, estimator of the gradient)
KINDS = {
    "k1": ("k1", "k1"),
    "kl": ("k1", "k1"),
    "abs": ("abs", "abs"),
    "k2": ("k2", "k2"),
    "mse": ("k2", "k2"),
    "k3": ("k3", "k3"),
    "low_var_kl": ("k3", "k3"),
}
KINDS |= {f"{kind}+": (value, "k2") for kind, (value, _) in KINDS.items()}


def _fake(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, value: str, gradient: str) -> torch.Tensor:
    return log_prob.new_empty(log_prob.shape, dtype=accumulate_dtype(log_prob, ref_log_prob))


_op = define_op(
    "kl_divergence",
    "(Tensor log_prob, Tensor ref_log_prob, str value, str gradient) -> Tensor",
    reference=kl_divergence_reference,
    cpu=kl_divergence_cpu,
    kernel="fastrl.kernels.kl_divergence.kernel:kl_divergence_triton",
    fake=_fake,
)
_backward_op = define_op(
    "kl_divergence_backward",
    "(Tensor upstream, Tensor log_prob, Tensor ref_log_prob, str gradient) -> Tensor",
    reference=kl_divergence_backward_reference,
    kernel="fastrl.kernels.kl_divergence.kernel:kl_divergence_backward_triton",
    fake=lambda upstream, log_prob, ref_log_prob, gradient: _fake(log_prob, ref_log_prob, "", gradient),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    log_prob, ref_log_prob, _, ctx.gradient = inputs
    ctx.save_for_backward(log_prob, ref_log_prob)


def _backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    log_prob, ref_log_prob = ctx.saved_tensors
    slope = _backward_op(upstream, log_prob, ref_log_prob, ctx.gradient)
    return slope.to(log_prob.dtype), (-slope).to(ref_log_prob.dtype), None, None


_op.register_autograd(_backward, setup_context=_setup)
refuse_double_backward(_backward_op, "kl_divergence")


def kl_divergence(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, *, kind: str = "k3") -> torch.Tensor:
    """KL(policy || reference) estimated at each sampled token, with x = log_prob - ref_log_prob.

        k1 (kl)   x                abs              |x|
        k2 (mse)  x^2 / 2          k3 (low_var_kl)  clamp(e^y - y - 1, -10, 10),  y = clamp(-x, -20, 20)

    A "+" behind a kind keeps its value and takes the gradient of k2, the one whose expectation is the gradient of the
    KL. Where the gradient that arrives is 0 (a masked token), 0 leaves, NaN log-probs or not.

    Args:
        log_prob: float, any shape, of the policy.
        ref_log_prob: like log_prob, of the reference.
        kind: see above.

    Returns:
        like log_prob, float32 (float64 if an input is).

    Raises:
        ValueError: an unknown kind, or a shape, dtype or device that is not allowed.
    """
    if kind == "full":
        raise ValueError(
            f"kl_divergence: kind = {kind!r} needs the whole distribution, not one token's log-prob: "
            f"use one of {', '.join(KINDS)}"
        )
    value, gradient = KINDS[check_choice("kl_divergence", "kind", kind, tuple(KINDS))]
    check_tensor("kl_divergence", "log_prob", log_prob)
    check_tensor("kl_divergence", "ref_log_prob", ref_log_prob, shape=log_prob.shape, device=log_prob.device)
    return _op(log_prob, ref_log_prob, value, gradient)
