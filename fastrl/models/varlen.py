"""Training attention by variable-length kernels: one call for all segments, `cu_seqlens_q` apart from `cu_seqlens_k`.

The keys of a segment, those of its prefix and its own, are gathered next to each other, under the bottom-right causal
mask. The gather's backward sums a row's copies in a fixed order, without atomics.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.models.tiles import Segment

# (query [U, Hq, D], key [K, Hkv, D], value [K, Hkv, Dv], plan, scaling, sliding window, softcap) -> [U, Hq, Dv]
VarlenFunction = Callable[..., Tensor]


class VarlenPlan:
    """Borders and gather indices of a micro-batch, made once. U rows, K gathered keys."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        ranges = [r for start, end, prefix in segments for r in (*prefix, (start, end))]
        parts = [torch.arange(first, end) for first, end in ranges]
        key_rows = torch.cat(parts) if parts else torch.arange(0)
        lengths_q = [end - start for start, end, _ in segments]
        lengths_k = [sum(b - a for a, b in prefix) + end - start for start, end, prefix in segments]
        self.max_q, self.max_k = max(lengths_q, default=0), max(lengths_k, default=0)
        self.cu_seqlens_q = _borders(lengths_q, device)  # [S'+1] int32
        self.cu_seqlens_k = _borders(lengths_k, device)  # [S'+1] int32
        self.key_rows = key_rows.to(device)  # [K] the row each gathered key is of
        self.copies = torch.argsort(key_rows, stable=True).to(device)  # [K] gathered keys, row after row
        self.num_copies = torch.bincount(key_rows, minlength=sum(lengths_q)).to(device)  # [U], at least 1

    def gather(self, rows: Tensor) -> Tensor:
        """rows [U, ...] -> [K, ...], differentiable."""
        return _Gather.apply(rows, self)


def _borders(lengths: list[int], device: torch.device) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(device, torch.int32)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: VarlenPlan) -> Tensor:
        ctx.plan = plan
        return rows.index_select(0, plan.key_rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plan, grad = ctx.plan, grads[0]
        wide = torch.promote_types(grad.dtype, torch.float32)
        sorted_copies = grad.index_select(0, plan.copies).flatten(1).to(wide)
        sums = torch.segment_reduce(sorted_copies, "sum", lengths=plan.num_copies, axis=0, unsafe=True)
        return sums.view(-1, *grad.shape[1:]).to(grad.dtype), None


def varlen_attention(
    function: VarlenFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: VarlenPlan,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """query [1, Hq, U, D], key and value [1, Hkv, U, D] -> [1, U, Hq, D]."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    keys, values = plan.gather(key[0].transpose(0, 1)), plan.gather(value[0].transpose(0, 1))
    return function(query[0].transpose(0, 1), keys, values, plan, scaling, sliding_window, softcap)[None]


@functools.cache
def flash_function() -> VarlenFunction | None:
    """flash-attn's varlen kernel, or None where it is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_varlen_func

    def run(
        q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            plan.cu_seqlens_q,
            plan.cu_seqlens_k,
            plan.max_q,
            plan.max_k,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
            deterministic=True,
        )

    return run


@functools.cache
def torch_function() -> VarlenFunction | None:
    """torch's own varlen kernel, or None where this torch has none. No score cap."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters):
        return None

    def run(
        q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        out = varlen_attn(
            q,
            k,
            v,
            plan.cu_seqlens_q,
            plan.cu_seqlens_k,
            plan.max_q,
            plan.max_k,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out if isinstance(out, Tensor) else out[0]

    return run
