"""A tensor times one number on the device, in place; nothing is moved where the number is 1, the usual upstream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .dispatch import on_device_of


@triton.jit(do_not_specialize=["total", "programs"])
def scale_kernel(x, factor, total, programs, BLOCK: tl.constexpr):
    """x *= factor, by `programs` programs in turns."""
    number = tl.load(factor).to(tl.float32)
    if number != 1.0:
        first = tl.program_id(0)
        blocks = total // BLOCK
        for block in range(first, blocks, programs):
            place = x + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(place, (tl.load(place).to(tl.float32) * number).to(x.dtype.element_ty))
        if first == 0:
            rest = tl.cast(blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = rest < total
            value = tl.load(x + rest, mask=inside, other=0).to(tl.float32)
            tl.store(x + rest, (value * number).to(x.dtype.element_ty), mask=inside)


def scale_in_place(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x *= factor [], without waiting for the device to say what the factor is. `x` is contiguous."""
    if x.numel():
        config = launch.config("scale_in_place", x)
        programs = min(config.pop("PROGRAMS"), triton.cdiv(x.numel(), config["BLOCK"]))
        with on_device_of(x):
            scale_kernel[(programs,)](x, factor, x.numel(), programs, **config)
    return x
