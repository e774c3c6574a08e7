"""KL estimators in Triton, elementwise, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import launch
from ..device import clip, exp_minus_1_minus, load_float
from ..dispatch import on_device_of
from ..rows import flat
from .reference import CAP, LIMIT, VALUES


@triton.jit
def _value(x, limit, cap, KIND: tl.constexpr):
    """KIND: place in VALUES (k1, abs, k2, k3)."""
    if KIND == 0:
        out = x
    elif KIND == 1:
        out = tl.abs(x)
    elif KIND == 2:
        out = 0.5 * x * x
    else:
        out = clip(exp_minus_1_minus(clip(-x, -limit, limit)), -cap, cap)
    return out


@triton.jit
def _slope(x, limit, cap, KIND: tl.constexpr):
    if KIND == 0:
        out = x * 0 + 1
    elif KIND == 1:
        out = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
    elif KIND == 2:
        out = x
    else:
        y = clip(-x, -limit, limit)
        raw = exp_minus_1_minus(y)
        out = tl.where((tl.abs(x) > limit) | (raw > cap), 0.0, -(raw + y))
    return out


@triton.jit
def _forward(
    log_prob, reference, out, at, total, limit, cap, KIND: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr
):
    t = at + tl.arange(0, BLOCK)
    x = load_float(log_prob, t, total, FULL) - load_float(reference, t, total, FULL)
    if FULL:
        tl.store(out + t, _value(x, limit, cap, KIND))
    else:
        tl.store(out + t, _value(x, limit, cap, KIND), mask=t < total)


@triton.jit(do_not_specialize=["total"])
def kl_forward_kernel(log_prob, reference, out, total, limit, cap, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out = estimator KIND of log_prob - reference."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if at + BLOCK <= total:
        _forward(log_prob, reference, out, at, total, limit, cap, KIND, True, BLOCK)
    else:
        _forward(log_prob, reference, out, at, total, limit, cap, KIND, False, BLOCK)


@triton.jit
def _backward(
    upstream, log_prob, reference, out, at, total, limit, cap,
    KIND: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = at + tl.arange(0, BLOCK)
    x = load_float(log_prob, t, total, FULL) - load_float(reference, t, total, FULL)
    up = load_float(upstream, t, total, FULL)
    # an upstream of exactly 0 is a masked token: NaN log-probs there stay there
    slope = tl.where(up == 0, 0.0, up * _slope(x, limit, cap, KIND))
    if FULL:
        tl.store(out + t, slope)
    else:
        tl.store(out + t, slope, mask=t < total)


@triton.jit(do_not_specialize=["total"])
def kl_backward_kernel(upstream, log_prob, reference, out, total, limit, cap, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out = upstream times the derivative of estimator KIND."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if at + BLOCK <= total:
        _backward(upstream, log_prob, reference, out, at, total, limit, cap, KIND, True, BLOCK)
    else:
        _backward(upstream, log_prob, reference, out, at, total, limit, cap, KIND, False, BLOCK)


def kl_divergence_triton(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, value: str, gradient: str) -> torch.Tensor:
    """Same arguments and results as `kl_divergence_reference`."""
    out = torch.empty(log_prob.shape, dtype=torch.float32, device=log_prob.device)
    if out.numel():
        config = launch.config("elementwise", log_prob)
        with on_device_of(log_prob):
            kl_forward_kernel[(triton.cdiv(out.numel(), config["BLOCK"]),)](
                flat(log_prob), flat(ref_log_prob), out, out.numel(), LIMIT, CAP, KIND=VALUES.index(value), **config
            )
    return out


def kl_divergence_backward_triton(
    upstream: torch.Tensor, log_prob: torch.Tensor, ref_log_prob: torch.Tensor, gradient: str
) -> torch.Tensor:
    """Same arguments and results as `kl_divergence_backward_reference`."""
    out = torch.empty(log_prob.shape, dtype=torch.float32, device=log_prob.device)
    if out.numel():
        config = launch.config("elementwise", log_prob)
        data = (flat(upstream), flat(log_prob), flat(ref_log_prob), out, out.numel())
        with on_device_of(log_prob):
            kl_backward_kernel[(triton.cdiv(out.numel(), config["BLOCK"]),)](
                *data, LIMIT, CAP, KIND=VALUES.index(gradient), **config
            )
    return out
