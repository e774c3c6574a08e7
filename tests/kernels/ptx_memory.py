"""The memory of a launch in the PTX machine: buffers, bounds, alignment, bytes moved."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64


class PtxFault(RuntimeError):
    """An access outside every buffer or misaligned, a divergent branch, or an instruction that is not modelled."""


class Memory:
    """The buffers of a launch. `loads` and `stores` count bytes by the width of the access."""

    def __init__(self, buffers: Sequence[tuple[str, int, np.ndarray]]):
        self.buffers = buffers
        self.loads: Counter[int] = Counter()
        self.stores: Counter[int] = Counter()

    @staticmethod
    def of(tensors: Sequence[tuple[str, torch.Tensor]]) -> Memory:
        """Buffers from the extents of tensors."""
        found = []
        for name, t in tensors:
            elements = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
            size = elements * t.element_size()
            if size:
                raw = (ctypes.c_uint8 * size).from_address(t.data_ptr())
                found.append((name, t.data_ptr(), np.ctypeslib.as_array(raw)))
        return Memory(found)

    def _places(self, address: np.ndarray, width: int, what: str):
        """Yield (rows of `address`, buffer, offsets) covering every address, or raise."""
        open_ = np.ones(len(address), dtype=bool)
        for _, base, data in self.buffers:
            here = open_ & (address >= base) & (address + width <= base + data.size)
            if here.any():
                open_ &= ~here
                yield here, data, (address[here] - base)[:, None] + np.arange(width)
        if open_.any():
            bad = int(address[open_][0])
            near = min(self.buffers, key=lambda b: min(abs(bad - b[1]), abs(bad - b[1] - b[2].size)))
            raise PtxFault(
                f"{what} outside every buffer: {bad - near[1]} bytes into {near[0]} of {near[2].size} bytes, "
                f"{int(open_.sum())} thread(s)"
            )

    def _aligned(self, address: np.ndarray, width: int, what: str) -> None:
        if (address % width).any():
            raise PtxFault(f"{what} of {width} bytes at address {int(address[(address % width) != 0][0])}: misaligned")

    def read(self, address: np.ndarray, width: int) -> np.ndarray:
        self._aligned(address, width, "load")
        out = np.empty((len(address), width), U8)
        for rows, data, offsets in self._places(address, width, "load"):
            out[rows] = data[offsets]
        # one value for all threads is one access
        self.loads[width] += width * (1 if (address == address[0]).all() else address.size)
        return out

    def write(self, address: np.ndarray, raw: np.ndarray) -> None:
        width = raw.shape[1]
        self._aligned(address, width, "store")
        for rows, data, offsets in self._places(address, width, "store"):
            data[offsets.ravel()] = raw[rows].ravel()
        self.stores[width] += address.size * width
