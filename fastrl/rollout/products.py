"""Linear products of the fast forward pass: oneDNN on blocked copies of the weights, or in place on the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

_PACK_ROWS = 32  # the number of rows oneDNN chooses its layout for; the layout then serves any number

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """One linear layer of a product of several, side by side. I inputs, O outputs."""

    weight: Tensor  # [O, I]
    bias: Tensor | None  # [O]
    factor: float = 1.0  # on its outputs
    interleave: int | None = None  # head size D: outputs i and i + D/2 of a head become neighbours


class Product:
    """x [M, I], residual [M, O] or None -> [residual +] the x W_i^T + b_i side by side [M, O]."""

    def __init__(self, parts: Sequence[Part], *, onednn: bool) -> None:
        assert all(p.factor == 1.0 and p.interleave is None for p in parts)
        self.parts = parts
        self.multiply = onednn_linear if onednn else linear

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        pieces = [self.multiply(x, part.weight, part.bias) for part in self.parts]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
        return out if residual is None else residual + out


class PackedProduct(Product):
    """The same on one blocked copy, made at the first call. `columns` [I] scales the inputs (a norm's weight)."""

    def __init__(self, parts: Sequence[Part], columns: Tensor | None = None) -> None:
        self.parts, self.columns = parts, columns
        self.packed: Any = None
        self.bias: Tensor | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.packed is None:
            self._pack()
        if residual is None or residual.dtype != x.dtype:
            out = onednn_linear(x, self.packed, self.bias)
            return out if residual is None else residual + out
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")

    def _pack(self) -> None:
        first = self.parts[0]
        if len(self.parts) == 1 and self.columns is None and first.factor == 1.0 and first.interleave is None:
            joined = first.weight.contiguous()
        else:
            joined = first.weight.new_empty(sum(len(p.weight) for p in self.parts), first.weight.shape[1])
            start = 0
            for part in self.parts:
                _fill(joined[start : start + len(part.weight)], part, self.columns)
                start += len(part.weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(joined, _PACK_ROWS)
        if first.bias is not None:
            self.bias = torch.cat([_bias(part) for part in self.parts])
        self.parts, self.columns = (), None


def _fill(out: Tensor, part: Part, columns: Tensor | None) -> None:
    """out [O, I] = the part's weight with its factor, its order and the columns' factors."""
    weight = part.weight
    if part.interleave is not None:
        weight = weight.unflatten(0, (-1, 2, part.interleave // 2))
        out = out.unflatten(0, (-1, part.interleave // 2, 2)).transpose(1, 2)
    if columns is not None:
        torch.mul(weight, columns if part.factor == 1.0 else columns * part.factor, out=out)
    else:
        torch.mul(weight, part.factor, out=out)


def _bias(part: Part) -> Tensor:
    assert part.bias is not None
    bias = part.bias * part.factor
    return bias if part.interleave is None else interleaved(bias, part.interleave)


def interleaved(x: Tensor, dim: int) -> Tensor:
    """x [k D] -> the same with elements i and i + D/2 of each D as neighbours."""
    return x.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten()


def onednn_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """x [M, I] weight^T + bias; weight [O, I], plain or packed. On plain float32 ones still faster than MKL."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def onednn_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `onednn_linear` serves these as they are: plain float32 on a CPU, outside autocast."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and type(weight) in (Tensor, nn.Parameter)
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )


def norm_of(weight: Tensor, eps: float, dtype: torch.dtype) -> Norm:
    """RMSNorm in the weight's type (float32 or wider), its result in `dtype`."""
    if dtype == weight.dtype:
        return lambda x: rms_norm(x, weight.shape, weight, eps)
    return lambda x: rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(dtype)


def folded_norm(size: int, eps: float, dtype: torch.dtype) -> Norm:
    """x [M, H] -> x / sqrt(sum x^2 + H eps): RMSNorm but for the factor sqrt(H) and the weight, in three operations."""
    constant = torch.tensor(math.sqrt(size * eps), dtype=dtype)
    return lambda x: x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), constant)


def fold_of(weight: Tensor) -> Tensor:
    """The `columns` that complete `folded_norm` [H]."""
    return weight * math.sqrt(len(weight))
