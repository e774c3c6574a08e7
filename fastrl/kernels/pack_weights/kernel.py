"""Cast-and-copy of many tensors into one flat buffer in Triton: one launch over a table of pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .. import launch
from ..dispatch import on_device_of

# dtype -> code in the table
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def _copy(source, out, offset, count, TYPE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Elements 0 .. count - 1 behind address `source` to out[offset ...]; WIDE: both sides are 16-byte aligned."""
    pointer = source.to(tl.pointer_type(TYPE))
    target = out + offset
    if WIDE:
        pointer = tl.multiple_of(pointer, 16)
        target = tl.multiple_of(target, 16)
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)
        if at + BLOCK <= count:
            tl.store(target + i, tl.load(pointer + i).to(out.dtype.element_ty))
        else:
            inside = i < count
            tl.store(target + i, tl.load(pointer + i, mask=inside).to(out.dtype.element_ty), mask=inside)


@triton.jit
def pack_kernel(table, out, BLOCK: tl.constexpr):
    """table [pieces, 4] int64: address, place in out, elements, code + 4 if both are 16-byte aligned."""
    row = table + tl.program_id(0).to(tl.int64) * 4
    source = tl.load(row)
    offset = tl.load(row + 1)
    count = tl.load(row + 2)
    code = tl.load(row + 3)
    if code == 0:
        _copy(source, out, offset, count, tl.float32, BLOCK, False)
    elif code == 1:
        _copy(source, out, offset, count, tl.bfloat16, BLOCK, False)
    elif code == 2:
        _copy(source, out, offset, count, tl.float16, BLOCK, False)
    elif code == 4:
        _copy(source, out, offset, count, tl.float32, BLOCK, True)
    elif code == 5:
        _copy(source, out, offset, count, tl.bfloat16, BLOCK, True)
    else:
        _copy(source, out, offset, count, tl.float16, BLOCK, True)


def piece_table(tensors: Sequence[torch.Tensor], out: torch.Tensor, piece: int) -> torch.Tensor:
    """The table of `pack_kernel` on the host: the tensors cut into pieces of `piece` elements (a multiple of 16)."""
    rows, at = [], 0
    for t in tensors:
        n, size, address = t.numel(), t.element_size(), t.data_ptr()
        # 16 elements: the widest unit that is 16 bytes or more on both sides
        wide = address % 16 == 0 and at % 16 == 0 and out.data_ptr() % 16 == 0
        start = torch.arange(0, n, piece, dtype=torch.int64)
        code = torch.full_like(start, CODES[t.dtype] + 4 * wide)
        rows.append(torch.stack([address + start * size, at + start, (n - start).clamp(max=piece), code], dim=1))
        at += n
    return torch.cat(rows) if rows else torch.empty(0, 4, dtype=torch.int64)


def pack_weights_triton(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Same arguments and results as `pack_weights_reference`."""
    sources = [t.contiguous() for t in tensors]  # kept alive until the launch is queued
    config = launch.config("pack_weights", out)
    table = piece_table(sources, out, config.pop("PIECE"))
    if table.shape[0]:
        if out.device.type == "cuda":
            table = table.pin_memory().to(out.device, non_blocking=True)
        with on_device_of(out):
            pack_kernel[(table.shape[0],)](table, out, **config)
