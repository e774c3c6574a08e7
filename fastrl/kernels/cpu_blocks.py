"""What the CPU paths of the batch ops share: passes over blocks that stay near the cache, and masks as factors.

On a CPU torch's operations on bool (`where`, sums, comparisons with 0) take three to ten times as long as a product of
floats. So a mask becomes a factor of 0 or 1, copied from its bytes, and whoever multiplies by it looks at a sum
afterwards: where that is not finite, something behind the mask may be NaN or infinite, and the reference computes the
result, which selects. Sums of blocks are added up in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

BLOCK = 1 << 17  # elements, for each thread


def block_size() -> int:
    """Elements of a block: one for each thread, since torch splits what it is given."""
    return BLOCK * torch.get_num_threads()


def blocks(total: int, size: int = 0) -> Iterator[slice]:
    """Slices of at most `size` of `total` elements (0: `block_size()`)."""
    size = size or block_size()
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def buffers(number: int, total: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Uninitialised buffers for blocks of `total` elements."""
    size = min(total, block_size())
    return list(torch.empty((number, size), dtype=dtype, device="cpu").unbind(0))


def as_bytes(mask: torch.Tensor) -> torch.Tensor:
    """0 or 1 of the mask's shape, one byte each."""
    return (mask if mask.dtype == torch.bool else mask != 0).view(torch.uint8)


def flat_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    """`as_bytes`, flat; None stays None."""
    return None if mask is None else as_bytes(mask).reshape(-1)


def factor(marks: torch.Tensor | None, part: slice, buffer: torch.Tensor) -> torch.Tensor | None:
    """0.0 or 1.0 of a block, in the buffer; None where everything counts."""
    return None if marks is None else buffer[: part.stop - part.start].copy_(marks[part])


def times(x: torch.Tensor, inside: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out = x inside, in out's dtype."""
    if inside is None:
        return out.copy_(x)
    return torch.mul(x, inside, out=out) if x.dtype == out.dtype else out.copy_(x).mul_(inside)


def is_finite(*values: float) -> bool:
    """True when all are."""
    return all(map(math.isfinite, values))
