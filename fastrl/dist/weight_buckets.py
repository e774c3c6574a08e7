"""Staging buckets that two processes see: filled by the trainer, read by the engine, in the order the line tells."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastrl.dist.weight_plan import ALIGN, Part
from fastrl.errors import WeightError
from fastrl.kernels.checks import FLOATS
from fastrl.kernels.pack_weights import pack_weights

NUM_SLOTS = 2
Seen = Callable[[int, Tensor], None]


class SendBuckets(Protocol):
    """The sender's side of a transport."""

    kind: str
    sums_as_it_fills: bool  # whether `fill` calls `seen`; otherwise the bucket is read once more afterwards

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        """What the receiver needs to open the buckets: message fields and file descriptors."""
        ...

    def fill(self, slot: int, parts: Sequence[Part], seen: Seen | None = None) -> Tensor:
        """Pack (runs of elements, wire dtype, byte offset) parts into a slot; returns its bytes [bucket_bytes] uint8.

        Where `sums_as_it_fills`, `seen(i, bytes)` is called with the bytes of part i while they are still in the cache.
        """
        ...

    def opened(self, message: dict[str, Any]) -> None:
        """The receiver has opened the buckets; its answer."""
        ...

    def freed(self, slot: int) -> None:
        """The receiver is done with the slot: the next `fill` may overwrite it."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class ReceiveBuckets(Protocol):
    """The receiver's side of a transport."""

    def answer(self) -> dict[str, Any]:
        """Fields of the message that says the buckets are open."""
        ...

    def read(self, slot: int) -> Tensor:
        """The bytes of a filled slot, [bucket_bytes] uint8."""
        ...

    def release(self, slot: int) -> dict[str, Any]:
        """The reader is done with a slot: fields of the acknowledgement."""
        ...

    def close(self) -> None:
        """Unmap the memory."""
        ...


class SharedMemorySend:
    """Buckets in anonymous shared memory: it has no name, so nothing is left behind whoever is killed."""

    kind = "shared_memory"
    sums_as_it_fills = True

    def __init__(self, bucket_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        self.bucket_bytes = bucket_bytes
        self.descriptors: list[int] = []
        self.staging: Tensor | None = None
        try:
            for _ in range(num_slots):
                self.descriptors.append(_allocate(bucket_bytes))
            self.slots = [_map(descriptor, bucket_bytes) for descriptor in self.descriptors]
        except BaseException:
            self.close()
            raise

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        return {"transport": self.kind, "bucket_bytes": self.bucket_bytes}, self.descriptors

    def fill(self, slot: int, parts: Sequence[Part], seen: Seen | None = None) -> Tensor:
        bucket = self.slots[slot]
        device = parts[0][0][0].device
        if device.type != "cpu":
            if self.staging is None:
                self.staging = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=device)
            pack_parts(parts, self.staging)
            used = max(offset + num_bytes(runs, dtype) for runs, dtype, offset in parts)
            bucket[:used].copy_(self.staging[:used])  # returns when the bytes are in host memory
        for i, (runs, dtype, offset) in enumerate(parts):
            if device.type == "cpu":
                pack_parts(parts[i : i + 1], bucket)
            if seen is not None:
                seen(i, bucket[offset : offset + num_bytes(runs, dtype)])
        return bucket

    def opened(self, message: dict[str, Any]) -> None:
        return None

    def freed(self, slot: int) -> None:
        return None

    def mark(self, slot: int) -> None:
        """What was written before is what the other process sees: true of host memory at any time."""

    def close(self) -> None:
        self.slots = []
        self.staging = None
        while self.descriptors:
            os.close(self.descriptors.pop())


class SharedMemoryReceive:
    """The receiver's mapping of `SharedMemorySend`."""

    def __init__(self, descriptors: Sequence[int], bucket_bytes: int) -> None:
        try:
            self.slots = [_map(descriptor, bucket_bytes) for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def answer(self) -> dict[str, Any]:
        return {}

    def read(self, slot: int) -> Tensor:
        return self.slots[slot]

    def release(self, slot: int) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.slots = []


def pack_parts(parts: Sequence[Part], bucket: Tensor) -> None:
    """Write flat tensors, cast to their wire types, at their byte offsets: one launch per run of equal wire types."""
    at = 0
    while at < len(parts):
        _, dtype, begin = parts[at]
        end = at + 1
        if dtype in FLOATS:
            while end < len(parts) and parts[end][1] == dtype:
                end += 1
            _pack_run(parts[at:end], bucket[begin:], dtype)
        else:
            room, first = bucket[begin : begin + num_bytes(parts[at][0], dtype)].view(dtype), 0
            for run in parts[at][0]:
                room[first : first + run.numel()].copy_(run)
                first += run.numel()
        at = end


def num_bytes(runs: Sequence[Tensor], dtype: torch.dtype) -> int:
    """Bytes of the runs in the type they travel in."""
    return sum(run.numel() for run in runs) * dtype.itemsize


def _pack_run(parts: Sequence[Part], room: Tensor, dtype: torch.dtype) -> None:
    tensors: list[Tensor] = []
    gap = torch.zeros(ALIGN // dtype.itemsize, dtype=dtype, device=room.device)
    at = begin = parts[0][2]
    for runs, _, offset in parts:
        if offset > at:  # parts lie back to back apart from the alignment
            tensors.append(gap[: (offset - at) // dtype.itemsize])
        tensors += runs
        at = offset + num_bytes(runs, dtype)
    pack_weights(tensors, room[: at - begin], dtype)


def _allocate(size: int) -> int:
    """Anonymous shared memory with its pages reserved, so that a lack of room shows here and not as a bus error."""
    if not hasattr(os, "memfd_create"):
        raise WeightError("shared memory for an engine process needs Linux: use an engine in the trainer's process")
    descriptor = os.memfd_create("fastrl-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise WeightError(
                f"no room for {size / 2**30:.3g} GiB of shared memory ({os.strerror(error.errno)}); there are two buckets: "
                "lower rollout.bucket_gib"
            ) from error
        raise
    return descriptor


def _map(descriptor: int, size: int) -> Tensor:
    memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)
