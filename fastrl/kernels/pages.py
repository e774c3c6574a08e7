"""Large pages for large CPU buffers: a fresh 113 MB tensor costs 53 ms of page faults, 12 ms with 2 MB pages.

Only where enough large pages are free: a kernel that has to make them by moving others can take longer than the faults.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import torch

WORTH_IT = 4 << 20  # bytes; smaller buffers come from memory that the allocator has touched before
LARGE_ORDER = 9  # a large page is 2^9 small ones
FREE_BLOCKS = Path("/proc/buddyinfo")


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call


def free_large_pages() -> int:
    """Large pages that the kernel has at hand, from its table of free blocks; 0 where it does not say."""
    try:
        lines = FREE_BLOCKS.read_text().splitlines()
    except OSError:
        return 0
    counts = [[int(n) for n in line.split()[4:]] for line in lines]  # "Node 0, zone Normal  n0 n1 ... n10"
    return sum(n << (order - LARGE_ORDER) for row in counts for order, n in enumerate(row) if order >= LARGE_ORDER)


def large_pages(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous, just made and not written yet, its memory marked for large pages: a hint that cannot fail."""
    size = x.numel() * x.element_size()
    if x.device.type != "cpu" or size < WORTH_IT or type(x) is not torch.Tensor:
        return x
    call = _madvise()
    if call is not None and free_large_pages() * (mmap.PAGESIZE << LARGE_ORDER) >= 2 * size:
        start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        call(start, x.data_ptr() + size - start, mmap.MADV_HUGEPAGE)
    return x
