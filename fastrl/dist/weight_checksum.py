"""A checksum of a tensor's bytes that both ends of a delivery compute at memory speed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

WORD = 8  # bytes
COLUMNS = 512  # words
ROW_BYTES = WORD * COLUMNS  # pieces of a tensor start at multiples of this
_ROWS = 128  # rows of a block: 512 KiB stay in the cache for the second sum
_K = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64
_MASK = (1 << 64) - 1


def checksum(data: Tensor, start: int = 0) -> int:
    """Checksum of a piece of a tensor; those of its pieces add up (mod 2^64) to the checksum of the whole.

        c = sum_i w_i (2 r_i + K (2 c_i + 1))  mod 2^64,   w_i the i-th 8-byte word, r_i = i // 512, c_i = i % 512

    The factor of a word is odd and differs from place to place: one changed word always shows, and so do words that
    changed places, short of a coincidence of 2^-64.

    Args:
        data: bytes [n] uint8, on any device; the last word is filled up with zeros.
        start: where the piece begins in its tensor, in bytes; a multiple of 4096.

    Returns:
        an integer in [0, 2^64).
    """
    return int(partial_checksum(data, start)) & _MASK


def partial_checksum(data: Tensor, start: int = 0) -> Tensor:
    """`checksum` as a 0-d int64 tensor on the device of `data`, without waiting for the device."""
    if start % ROW_BYTES:
        raise ValueError(f"checksum: start = {start}: a multiple of {ROW_BYTES} is needed")
    words = _words(data)
    rows, rest = divmod(words.numel(), COLUMNS)
    first = start // ROW_BYTES
    whole = words[: rows * COLUMNS].view(rows, COLUMNS)
    total = _on_cpu(whole, first) if words.device.type == "cpu" else _on_device(whole, first)
    if rest:
        total = total + _weighted(words[rows * COLUMNS :].view(1, rest), first + rows)
    return total


def _words(data: Tensor) -> Tensor:
    """Bytes as int64; a copy where they are not aligned or do not fill the last word."""
    if data.numel() and data.numel() % WORD == 0 and data.data_ptr() % WORD == 0 and data.storage_offset() % WORD == 0:
        return data.view(torch.int64)
    padded = data.new_zeros(-(-data.numel() // WORD) * WORD)
    padded[: data.numel()] = data
    return padded.view(torch.int64)


def _weighted(block: Tensor, first: int) -> Tensor:
    row = 2 * torch.arange(first, first + block.shape[0], device=block.device)
    column = _K * (2 * torch.arange(block.shape[1], device=block.device) + 1)
    return (block.sum(1) * row).sum() + (block.sum(0) * column).sum()


def _on_device(whole: Tensor, first: int) -> Tensor:
    return _weighted(whole, first)


def _on_cpu(whole: Tensor, first: int) -> Tensor:
    """NumPy's integer sums run at memory speed, torch's over columns do not."""
    words = whole.numpy()
    columns = np.zeros(COLUMNS, np.int64)
    total = np.int64(0)
    with np.errstate(over="ignore"):
        for at in range(0, len(words), _ROWS):
            block = words[at : at + _ROWS]
            columns += np.add.reduce(block, 0)
            row = 2 * np.arange(first + at, first + at + len(block))
            total += np.add.reduce(np.add.reduce(block, 1) * row)
        column = np.int64(_K) * (2 * np.arange(COLUMNS) + 1)
        total += np.add.reduce(columns * column)
    return torch.tensor(int(total), dtype=torch.int64)
