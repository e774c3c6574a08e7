"""Saved gradient times upstream gradient in Triton, elementwise; the upstream is one value or one per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .device import load_float
from .dispatch import on_device_of
from .rows import flat


@triton.jit
def _scale(gradient, upstream, out, at, total, factor, EACH: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    t = at + tl.arange(0, BLOCK)
    up = factor
    if EACH:
        up = load_float(upstream, t, total, FULL)
    # an upstream of exactly 0 is a masked token: whatever the saved gradient holds there, nothing flows
    scaled = tl.where(up == 0, 0.0, load_float(gradient, t, total, FULL) * up)
    if FULL:
        tl.store(out + t, scaled)
    else:
        tl.store(out + t, scaled, mask=t < total)


@triton.jit(do_not_specialize=["total"])
def chain_kernel(
    gradient, upstream, count, out, total, EACH: tl.constexpr, HAS_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """out = gradient x upstream [/ max(count, 1)]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    factor = 1.0
    if not EACH:
        factor = tl.load(upstream).to(tl.float32)
    if HAS_COUNT:
        factor = factor / tl.maximum(tl.load(count).to(tl.float32), 1.0)
    if at + BLOCK <= total:
        _scale(gradient, upstream, out, at, total, factor, EACH, True, BLOCK)
    else:
        _scale(gradient, upstream, out, at, total, factor, EACH, False, BLOCK)


def chain_triton(gradient: torch.Tensor, upstream: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """out = gradient x upstream / max(count, 1), float32; count only with a single upstream value."""
    out = torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)
    if out.numel():
        config = launch.config("elementwise", gradient)
        each = upstream.numel() > 1 or upstream.dim() == gradient.dim() != 0
        with on_device_of(gradient):
            chain_kernel[(triton.cdiv(out.numel(), config["BLOCK"]),)](
                flat(gradient),
                flat(upstream),
                count,
                out,
                out.numel(),
                EACH=each,
                HAS_COUNT=count is not None,
                **config,
            )
    return out
