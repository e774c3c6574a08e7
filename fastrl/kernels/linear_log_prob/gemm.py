"""The three matrix products of a language-model head, and the dtypes they run in.

On a CPU in float32, oneDNN's inner product is 10-25 % faster than `torch.mm` for hidden weight^T and d_logits weight
(one thread, AVX-512, 256 rows of 49152 x 576). It gives a new tensor, so it runs over blocks of the vocabulary that
stay in the cache until they are copied.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

VOCABULARY_BLOCK = 4096  # rows of the weight in one product on a CPU
LEAST_WORK = 1 << 28  # multiplications; below, torch.mm's shorter start wins


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of the products: hidden's own, or the autocast one inside an autocast region (never below float64)."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


@functools.cache
def _inner_product() -> Any:
    """oneDNN's a [M, K] b [N, K]^T for plain float32 tensors on a CPU, or None where this torch has none."""
    op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if op is None or not torch.backends.mkldnn.is_available():
        return None
    try:
        product = op(torch.ones(2, 3), torch.ones(4, 3), None, "none", [], "")
    except (RuntimeError, TypeError):
        return None
    return op if product.shape == (2, 4) and bool((product == 3).all()) else None


def _use_inner_product(a: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        a.dtype == torch.float32
        and a.device.type == "cpu"
        and a.shape[0] * weight.numel() >= LEAST_WORK
        and bool(torch.backends.mkldnn.enabled)
        and not torch.compiler.is_compiling()
        and _inner_product() is not None
    )


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out [C, V] = hidden [C, H] weight [V, H]^T + bias [V]."""
    if _use_inner_product(hidden, weight):
        product = _inner_product()
        for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
            part = slice(start, start + VOCABULARY_BLOCK)
            out[:, part] = product(hidden, weight[part], None if bias is None else bias[part], "none", [], "")
        return out
    torch.mm(hidden, weight.t(), out=out)
    return out if bias is None else out.add_(bias)


def hidden_gradient(d_logits: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [C, H] = d_logits [C, V] weight [V, H]."""
    if _use_inner_product(d_logits, weight):
        out.copy_(_inner_product()(d_logits, weight.t(), None, "none", [], ""))
    else:
        torch.mm(d_logits, weight, out=out)


@functools.cache
def _sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True when a GPU's matrix product adds products of a short dtype to a float32 total, tried once on small ones."""
    if device.type != "cuda":
        return False
    a, total = torch.ones((16, 16), dtype=dtype, device=device), torch.ones((16, 16), device=device)
    try:
        torch.addmm(total, a.t(), a, out_dtype=torch.float32, beta=1, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 17).all())


def add_weight_gradient(total: torch.Tensor, d_logits: torch.Tensor, hidden: torch.Tensor, fresh: bool) -> None:
    """total [V, H] += d_logits [C, V]^T hidden [C, H]; `fresh`: total is uninitialised and is overwritten.

    A float32 total of products in a shorter dtype takes each chunk's product rounded once, and sums in float32.
    """
    if total.dtype == d_logits.dtype:
        if fresh:
            torch.mm(d_logits.t(), hidden, out=total)
        else:
            total.addmm_(d_logits.t(), hidden)
        return
    if total.dtype == torch.float32 and _sums_in_float32(total.device, d_logits.dtype):
        torch.addmm(total, d_logits.t(), hidden, out_dtype=torch.float32, beta=0 if fresh else 1, out=total)
        return
    size = VOCABULARY_BLOCK if total.device.type == "cpu" else total.shape[0]
    product = d_logits.new_empty((min(size, total.shape[0]), total.shape[1]))
    for start in range(0, total.shape[0], size):
        part = total[start : start + size]
        torch.mm(d_logits[:, start : start + size].t(), hidden, out=product[: part.shape[0]])
        if fresh:
            part.copy_(product[: part.shape[0]])
        else:
            part.add_(product[: part.shape[0]])


def add_bias_gradient(total: torch.Tensor, d_logits: torch.Tensor) -> None:
    """total [V] += sum of d_logits [C, V] over rows, in total's dtype."""
    total.add_(d_logits.sum(0, dtype=total.dtype))
