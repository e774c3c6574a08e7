"""The layout of a training micro-batch: every row reads itself and the rows before it in its sequence.

Four ways to compute it, the same to rounding: flash-attn's varlen kernel, torch's own varlen kernel (both half
precision on a GPU), SDPA per segment, and tiles of plain matrix products (any device and type, score caps and sinks).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fastrl.errors import ModelError
from fastrl.models import varlen
from fastrl.models.attention import AttentionLayout
from fastrl.models.kernel_check import what_is_wrong
from fastrl.models.tiles import Segment, TilePlan, tiled_attention

NAMES = {
    "flash": "flash-attn varlen",
    "varlen": "torch varlen",
    "sdpa": "SDPA per segment",
    "tiled": "tiled matrix products",
}
KERNELS = {"flash": varlen.flash_function, "varlen": varlen.torch_function}  # in the order of preference
HALF = (torch.float16, torch.bfloat16)
MAX_KERNEL_HEAD_DIM = 256  # the varlen kernels take no larger heads


def choose_attention(device: torch.device, dtype: torch.dtype, wanted: str = "auto") -> str:
    """The implementation (a key of NAMES) for a device and compute type; `wanted` is model.attention.

    Raises:
        ModelError: the wanted one cannot run here, with what to choose instead.
    """
    if wanted not in ("auto", *NAMES):
        raise ModelError(f"model.attention = {wanted}: choose auto, {', '.join(NAMES)}")
    half_on_gpu = device.type == "cuda" and dtype in HALF
    if wanted == "auto":
        if half_on_gpu:
            return next((name for name in KERNELS if why_not_kernel(name, device) is None), "sdpa")
        return "sdpa" if device.type == "cuda" else "tiled"
    if wanted in KERNELS:
        if not half_on_gpu:
            raise ModelError(
                f"model.attention = {wanted}: needs a GPU and run.dtype = bfloat16, "
                f"this is {device.type} in {dtype}; use auto"
            )
        if (why := why_not_kernel(wanted, device)) is not None:
            raise ModelError(f"model.attention = {wanted}: {NAMES[wanted]} {why}; use auto")
    return wanted


@functools.cache
def why_not_kernel(name: str, device: torch.device) -> str | None:
    """None when a varlen kernel is installed and computes the packed layout on this device; else what is wrong."""
    function = KERNELS[name]()
    return "is not installed" if function is None else what_is_wrong(function, device, torch.bfloat16)


class StandInLayout:
    """A layout of no rows for a stream of one row that is not among them."""

    def __init__(self, layout: AttentionLayout) -> None:
        self.layout = layout

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """query [1, Hq, 1, D], key and value [1, Hkv, 1, D] -> zeros [1, 1, Hq, D], gradients of 0 to all three."""
        out = self.layout.attend(module, query[:, :, :0], key[:, :, :0], value[:, :, :0], **how)
        return nn.functional.pad(out, (0, 0, 0, 0, 0, 1))


def no_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[1, 0, Hq, Dv] for a stream without rows; query, key and value still get gradients (of 0 rows)."""
    out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)
    return out + 0 * (query.sum() + key.sum())


class TrainingLayout:
    """Segments of a micro-batch as a fastrl layout. The plans it makes are kept for all layers and passes.

    Args:
        segments: (start, end, prefix ranges) rows; they cover the stream in order.
        device: of the tensors it will see.
        attention: auto or a key of NAMES; a call it cannot serve (score cap, sinks, large heads) runs tiled.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device, attention: str = "auto") -> None:
        self.segments = segments
        self.device = device
        self.wanted = attention
        self._tiles: TilePlan | None = None
        self._varlen: varlen.VarlenPlan | None = None
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [1, Hq, U, D], key and value [1, Hkv, U, D] -> [1, U, Hq, D]."""
        if not query.shape[2]:
            return no_rows(query, key, value)
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        wanted = "auto" if self.wanted in KERNELS and dtype not in HALF else self.wanted
        name = choose_attention(query.device, dtype, wanted)
        if name in KERNELS:
            function = KERNELS[name]()
            capless = softcap is None or name == "flash"
            if function and capless and sinks is None and query.shape[-1] <= MAX_KERNEL_HEAD_DIM:
                self._varlen = self._varlen or varlen.VarlenPlan(self.segments, self.device)
                return varlen.varlen_attention(
                    function,
                    query,
                    key,
                    value,
                    self._varlen,
                    scaling=scaling,
                    sliding_window=sliding_window,
                    softcap=softcap,
                )
        if name == "sdpa" and softcap is None and sinks is None:
            return self._per_segment(query, key, value, scaling, sliding_window)
        self._tiles = self._tiles or TilePlan(self.segments, self.device)
        return tiled_attention(
            query,
            key,
            value,
            self._tiles,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )

    def _per_segment(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        outputs = []
        for start, end, before in self.segments:
            prefix = sum(b - a for a, b in before)
            k, v = key[:, :, start:end], value[:, :, start:end]
            if before:
                k = torch.cat([*(key[:, :, a:b] for a, b in before), k], dim=2)
                v = torch.cat([*(value[:, :, a:b] for a, b in before), v], dim=2)
            mask = self._mask(end - start, prefix, window)
            outputs.append(
                scaled_dot_product_attention(
                    query[:, :, start:end],
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scaling,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _mask(self, rows: int, prefix: int, window: int | None) -> Tensor | None:
        """Bottom-right causal mask [rows, prefix + rows]; None where the plain causal one is the same."""
        if window is not None and window >= prefix + rows:
            window = None
        if prefix == 0 and window is None:
            return None
        if (rows, prefix, window) not in self._masks:
            query, key = torch.arange(prefix, prefix + rows), torch.arange(prefix + rows)
            distance = (query[:, None] - key).to(self.device)
            self._masks[rows, prefix, window] = (distance >= 0) & (distance < (window or prefix + rows))
        return self._masks[rows, prefix, window]
