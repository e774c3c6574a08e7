"""Exact savings on a CPU: oneDNN products for linear layers, and a heap that is kept between steps.

Both leave the mathematics alone: float32 stays float32, only the order of additions inside a product differs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's names for mallopt
_MADV_HUGEPAGE = 14
_LARGE_PAGE = 2**21


def keep_heap() -> bool:
    """Tell the allocator to keep freed memory, and the system to back it with large pages where it may.

    A training step frees and asks for the same gigabytes of activations and gradients every time. Handed back and
    faulted in again page by page they cost a twentieth of a step, the lookups of small pages nearly as much. Peak
    memory is the same; memory between steps stays at the peak. Call it before models are loaded.

    Returns:
        whether the C library took the settings (False outside glibc).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        kept = bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1))
    except (OSError, AttributeError):
        return False
    if kept:
        _ask_for_large_pages(libc)
    return kept


@functools.cache
def _ask_for_large_pages(libc: Any) -> bool:
    """Grow the heap by half of the memory, untouched, and mark that part; what is freed stays marked."""
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    block = libc.malloc(size)
    if not block:
        return False  # a limit on address space
    end = libc.sbrk(0)
    libc.free(block)
    first = -(-block // _LARGE_PAGE) * _LARGE_PAGE
    length = (end - first) // _LARGE_PAGE * _LARGE_PAGE
    return length > 0 and block + size <= end and libc.madvise(first, length, _MADV_HUGEPAGE) == 0


@functools.cache
def _inner_product() -> Any:
    """oneDNN's rows [M, I] weight [O, I]^T + bias for float32 on a CPU, or None where this torch has none."""
    op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if op is None or not torch.backends.mkldnn.is_available():
        return None
    try:
        product = op(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4), "none", [], "")
    except (RuntimeError, TypeError):
        return None
    return op if product.shape == (2, 4) and bool((product == 4).all()) else None


class OneDnnLinear(nn.Linear):
    """nn.Linear whose output and input gradient come from oneDNN, up to a tenth faster than MKL's.

    Everything but float32 on a CPU outside autocast goes the usual way.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if (
            input.dtype != torch.float32
            or weight.dtype != torch.float32
            or input.device.type != "cpu"
            or input.numel() == 0
            or type(weight) is not nn.Parameter
            or not torch.backends.mkldnn.enabled
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
        ):
            return nn.functional.linear(input, weight, self.bias)
        return _OneDnnLinear.apply(input, weight, self.bias)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [M, I] weight [O, I]^T + bias -> [M, O]."""
    return _inner_product()(rows, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input.flatten(0, -2), weight, bias).view(*input.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        need_input, need_weight, need_bias = ctx.needs_input_grad
        return (
            _product(rows, weight.t(), None).view(input.shape) if need_input else None,
            torch.mm(rows.t(), input.flatten(0, -2)) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def use_onednn(model: nn.Module) -> int:
    """Turn the plain linear layers of a model into `OneDnnLinear`, in place; returns how many (0 without oneDNN)."""
    if _inner_product() is None:
        return 0
    found = [m for m in model.modules() if type(m) is nn.Linear]
    for module in found:
        module.__class__ = OneDnnLinear
    return len(found)
