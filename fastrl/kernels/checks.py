"""Argument checks shared by the ops: each failure is a ValueError with the argument, its value and what is allowed.

Shapes, dtypes, devices and options are checked in the public functions. Values inside tensors (`cu_seqlens`, labels)
are checked by the implementation of the op, where tensors are real, and only on the CPU: reading them on a GPU would
stop the stream. `FASTRL_CHECK_VALUES=1` checks them there too; kernels stay inside their buffers either way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MASKS = (torch.bool, *INTEGERS, *FLOATS)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_tensor(
    op: str,
    name: str,
    x: object,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    ndim: int | tuple[int, ...] | None = None,
    shape: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless `x` is a dense tensor of the dtypes, number of dimensions, shape and device asked for."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{op}: {name} = {x!r}: a torch.Tensor is needed")
    if x.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {x.layout}: a dense (strided) tensor is needed")
    if x.dtype not in dtypes:
        raise ValueError(f"{op}: {name} has dtype {str(x.dtype).removeprefix('torch.')}: use one of {_names(dtypes)}")
    if ndim is not None:
        allowed = (ndim,) if isinstance(ndim, int) else ndim
        if x.dim() not in allowed:
            want = " or ".join(str(n) for n in allowed)
            raise ValueError(f"{op}: {name} has shape {list(x.shape)}: {want} dimension(s) are needed")
    if shape is not None and x.shape != shape and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}: {list(shape)} is needed")
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}, the other tensors on {device}: move it there")


def check_float(
    op: str,
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Return `value` as a float; raise ValueError unless it is finite and inside [low, high] (open ends on request)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{op}: {name} = {value!r}: a number is needed")
    v = float(value)
    below = v <= low if open_low else v < low
    above = v >= high if open_high else v > high
    if not math.isfinite(v) or below or above:
        left, right = "(" if open_low or low == -math.inf else "[", ")" if open_high or high == math.inf else "]"
        raise ValueError(f"{op}: {name} = {value!r}: a finite number in {left}{low:g}, {high:g}{right} is needed")
    return v


def check_choice(op: str, name: str, value: object, choices: Sequence[str]) -> str:
    """Return `value`; raise ValueError unless it is one of the choices."""
    if value not in choices:
        raise ValueError(f"{op}: {name} = {value!r}: use one of {', '.join(choices)}")
    return str(value)


def check_mask(op: str, mask: torch.Tensor | None, like: torch.Tensor, name: str = "mask") -> None:
    """Raise ValueError unless `mask` is None or a bool / integer / float tensor of `like`'s shape and device."""
    if mask is not None:
        check_tensor(op, name, mask, dtypes=MASKS, shape=like.shape, device=like.device)


def check_layout(op: str, name: str, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """Check the layout of token tensor `x` and return the number of sequences.

    Ragged: `x` [T] with `cu_seqlens` [S+1]. Padded: `x` [B, T] without.

    Raises:
        ValueError: neither layout fits.
    """
    if cu_seqlens is None:
        if x.dim() != 2:
            raise ValueError(
                f"{op}: {name} has shape {list(x.shape)} and cu_seqlens is None: "
                "give [T] with cu_seqlens [S+1], or [B, T] without"
            )
        return x.shape[0]
    check_tensor(op, "cu_seqlens", cu_seqlens, dtypes=(torch.int32, torch.int64), ndim=1, device=x.device)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens is empty: [S+1] offsets that start at 0 are needed")
    if x.dim() != 1:
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}: with cu_seqlens the layout is ragged, [T]")
    return cu_seqlens.shape[0] - 1


def values_are_checked(x: torch.Tensor) -> bool:
    """True when the contents of index tensors are to be read: on a CPU, or anywhere under `FASTRL_CHECK_VALUES=1`."""
    return x.device.type == "cpu" or os.environ.get("FASTRL_CHECK_VALUES", "0") == "1"


def check_cu_seqlens_values(op: str, cu_seqlens: torch.Tensor | None, total: int) -> None:
    """Raise ValueError unless the offsets start at 0, never fall and end at `total`. For use inside implementations."""
    if cu_seqlens is None or not values_are_checked(cu_seqlens):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"{op}: cu_seqlens[0] = {first}: offsets start at 0")
    if cu_seqlens.shape[0] > 1:
        steps = cu_seqlens[1:] - cu_seqlens[:-1]
        if int(steps.amin()) < 0:
            at = int((steps < 0).nonzero()[0])
            raise ValueError(
                f"{op}: cu_seqlens[{at + 1}] = {int(cu_seqlens[at + 1])} is below cu_seqlens[{at}]: offsets never fall"
            )
    if last != total:
        raise ValueError(f"{op}: cu_seqlens[-1] = {last}: it has to equal the number of tokens, {total}")


def check_label_values(op: str, labels: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise ValueError unless every label is in [0, vocabulary) or the ignore index. For use inside implementations."""
    if labels.numel() == 0 or not values_are_checked(labels):
        return
    bad = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if bool(bad.any()):
        at = int(bad.reshape(-1).nonzero()[0])
        value = int(labels.reshape(-1)[at])
        raise ValueError(
            f"{op}: labels[{at}] = {value}: use 0 <= label < {vocabulary}, or ignore_index = {ignore_index}"
        )
