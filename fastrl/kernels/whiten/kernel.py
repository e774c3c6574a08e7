"""Masked whitening in Triton: statistics (where not given), then one elementwise pass that reads them on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import launch
from ..device import load_float, trained_tokens
from ..dispatch import on_device_of
from ..masked_stats.kernel import overall_stats
from ..rows import flat, flat_mask


@triton.jit
def _apply(x, mask, y, at, total, mean, scale, HAS_MASK: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    t = at + tl.arange(0, BLOCK)
    inside = trained_tokens(mask, t, 0, total, total, HAS_MASK, FULL)
    out = tl.where(inside, (load_float(x, t, total, FULL) - mean) * scale, 0.0)
    if FULL:
        tl.store(y + t, out)
    else:
        tl.store(y + t, out, mask=t < total)


@triton.jit(do_not_specialize=["total"])
def whiten_kernel(
    x, mask, y, mean, var, count, total, eps, HAS_MASK: tl.constexpr, HAS_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """y = (x - mean) / sqrt(var + eps) inside the mask, 0 outside; the statistics are read from the device."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    centre = tl.load(mean).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.load(var).to(tl.float32) + eps)
    if HAS_COUNT:
        # one value has no variance: it is centred, not scaled
        scale = tl.where(tl.load(count) < 2, 1.0, scale)
    if at + BLOCK <= total:
        _apply(x, mask, y, at, total, centre, scale, HAS_MASK, True, BLOCK)
    else:
        _apply(x, mask, y, at, total, centre, scale, HAS_MASK, False, BLOCK)


def whiten_triton(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    """Same arguments and results as `whiten_reference`."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    total = x.numel()
    if total == 0:
        return y
    count = None
    if mean is None or var is None:
        out, count = overall_stats(x, mask, ddof)
        mean, var = out[1], out[2]
    config = launch.config("elementwise", x)
    with on_device_of(x):
        whiten_kernel[(triton.cdiv(total, config["BLOCK"]),)](
            flat(x), flat_mask(mask), y, mean, var, count, total, eps,
            HAS_MASK=mask is not None, HAS_COUNT=count is not None, **config,
        )  # fmt: skip
    return y
