"""Training attention by variable-length kernels: one call for all segments, `cu_seqlens_q` apart from `cu_seqlens_k`.

A response's keys are its prompt's and its own, gathered next to each other, under the bottom-right causal mask. The
gather's backward sums the prompt's gradients over its responses in a fixed order, without atomics.
"""

from __future__ import annotations

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
        num_rows = max((s[1] for s in segments), default=0)
        rows = torch.arange(num_rows)
        key_rows: list[Tensor] = []
        readers: dict[tuple[int, int], list[int]] = {}  # prefix -> first gathered key of each segment that reads it
        lengths_q, lengths_k, own = [], [], []
        position = 0
        for start, end, prefix_start, prefix_end in segments:
            prefix = prefix_end - prefix_start
            key_rows += [rows[prefix_start:prefix_end], rows[start:end]]
            if prefix:
                readers.setdefault((prefix_start, prefix_end), []).append(position)
            own.append(torch.arange(position + prefix, position + prefix + end - start))
            lengths_q.append(end - start)
            lengths_k.append(prefix + end - start)
            position += lengths_k[-1]
        self.num_rows, self.num_keys = num_rows, position
        self.max_q, self.max_k = max(lengths_q, default=0), max(lengths_k, default=0)
        self.cu_seqlens_q = _borders(lengths_q, device)  # [S'+1] int32
        self.cu_seqlens_k = _borders(lengths_k, device)  # [S'+1] int32
        self.key_rows = (torch.cat(key_rows) if key_rows else rows).to(device)  # [K] the row each gathered key is of
        self.own_keys = (torch.cat(own) if own else rows).to(device)  # [U] where a row's own key lies among the K
        self.prefix_rows, self.prefix_keys = (t.to(device) for t in _prefix_table(readers, position))

    def gather(self, rows: Tensor) -> Tensor:
        """rows [U, ...] -> [K, ...], differentiable."""
        return _Gather.apply(rows, self)


def _borders(lengths: list[int], device: torch.device) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(device, torch.int32)


def _prefix_table(readers: dict[tuple[int, int], list[int]], sentinel: int) -> tuple[Tensor, Tensor]:
    """(prefix rows [P], the gathered keys [P, readers] that are copies of each, filled up with `sentinel`)."""
    width = max((len(starts) for starts in readers.values()), default=0)
    rows, keys = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, width, dtype=torch.int64)]
    for (start, end), starts in readers.items():
        table = torch.full((end - start, width), sentinel)
        table[:, : len(starts)] = torch.arange(end - start)[:, None] + torch.tensor(starts)
        rows.append(torch.arange(start, end))
        keys.append(table)
    return torch.cat(rows), torch.cat(keys)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: VarlenPlan) -> Tensor:
        ctx.plan = plan
        return rows.index_select(0, plan.key_rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plan, grad = ctx.plan, grads[0]
        total = grad.index_select(0, plan.own_keys)
        if plan.prefix_rows.numel():
            padded = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
            copies = padded[plan.prefix_keys]  # [P, readers, ...]
            sums = copies.sum(1, dtype=torch.promote_types(grad.dtype, torch.float32))
            total[plan.prefix_rows] = (total[plan.prefix_rows] + sums).to(grad.dtype)
        return total, None


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
