"""What is delivered and in which buckets: computed from names, shapes and types alone, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.dist.weight_checksum import ROW_BYTES
from fastrl.errors import WeightError

ALIGN = 64  # bytes: every piece starts at a multiple, so that wide loads and views of any type are possible
MIN_BUCKET_BYTES = ROW_BYTES
OVERLAPPING = 8  # buckets of an update, so that its ends work at the same time
SMALL = 32 << 20  # bytes: a smaller bucket costs more in messages than it gains


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a delivery, by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # as it travels; None where the receiver takes any
    same_as: str | None = None  # tied: its bytes are those of this earlier tensor and travel once

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        assert self.dtype is not None
        return self.numel * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """As it goes over the line."""
        return [self.name, list(self.shape), None if self.dtype is None else dtype_name(self.dtype), self.same_as]

    @staticmethod
    def from_json(fields: Sequence[Any]) -> TensorSpec:
        """The inverse of `to_json`."""
        name, shape, dtype, same_as = fields
        return TensorSpec(str(name), tuple(shape), None if dtype is None else torch_dtype(dtype), same_as)


@dataclass(frozen=True)
class Piece:
    """Elements `start ... start + count - 1` of a tensor at byte `offset` of a bucket."""

    index: int  # of the tensor in the manifest
    start: int
    count: int
    offset: int

    def to_json(self) -> list[int]:
        """As it goes over the line."""
        return [self.index, self.start, self.count, self.offset]


Bucket = tuple[Piece, ...]
Part = tuple[list[Tensor], torch.dtype, int]  # runs of elements, type they travel in, byte offset in the bucket


def filled_bytes(manifest: Iterable[TensorSpec], bucket_bytes: int) -> int:
    """How far each bucket of `bucket_bytes` is filled: an update of few, full buckets would not overlap.

    A tensor that fits a bucket is not split for that: the engine would have to put it together again.
    """
    sizes = [spec.num_bytes for spec in manifest if spec.same_as is None]
    largest = max((-(-size // ROW_BYTES) * ROW_BYTES for size in sizes if size <= bucket_bytes), default=0)
    return min(bucket_bytes, max(SMALL, largest, -(-sum(sizes) // OVERLAPPING)))


def plan_buckets(manifest: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Pieces of all tensors in order, bucket by bucket. A tensor that does not fit what is left of a bucket starts the
    next one, except where it is larger than a whole bucket: then it is split.

    Args:
        manifest: what is delivered; tied tensors (`same_as`) take no room.
        bucket_bytes: size of a bucket; at least 4096.

    Raises:
        WeightError: the bucket is too small for any tensor.
    """
    if bucket_bytes < MIN_BUCKET_BYTES:
        raise WeightError(f"a bucket of {bucket_bytes} bytes: use {MIN_BUCKET_BYTES} or more (rollout.bucket_gib)")
    room = bucket_bytes // ROW_BYTES * ROW_BYTES
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0
    for index, spec in enumerate(manifest):
        if spec.same_as is not None:
            continue
        assert spec.dtype is not None
        size, start = spec.dtype.itemsize, 0
        if used and used + spec.num_bytes > room:
            buckets.append(tuple(pieces))
            pieces, used = [], 0
        while start < spec.numel or spec.numel == 0:
            # cut at a multiple of 4096 bytes, which the checksum needs
            count = min(spec.numel - start, room // size)
            pieces.append(Piece(index, start, count, used))
            used += -(-count * size // ALIGN) * ALIGN
            start += count
            if start < spec.numel:
                buckets.append(tuple(pieces))
                pieces, used = [], 0
            if spec.numel == 0:
                break
    if pieces:
        buckets.append(tuple(pieces))
    return buckets


def names_by_tensor(manifest: Iterable[TensorSpec]) -> dict[str, list[str]]:
    """Every name under which a tensor is wanted, by its first one: its own, then those tied to it."""
    names: dict[str, list[str]] = {}
    for spec in manifest:
        names.setdefault(spec.same_as or spec.name, []).append(spec.name)
    return names


def compare_manifests(offered: Iterable[TensorSpec], expected: Iterable[TensorSpec]) -> str | None:
    """What differs between what is sent and what the engine expects, in words; None when they agree.

    An expected dtype of None accepts any.
    """
    have = {spec.name: spec for spec in offered}
    want = {spec.name: spec for spec in expected}
    problems = [f"{name} is not sent" for name in want if name not in have]
    problems += [f"{name} is unknown to the engine" for name in have if name not in want]
    for name, spec in want.items():
        got = have.get(name)
        if got is None:
            continue
        if got.shape != spec.shape:
            problems.append(f"{name} is {list(got.shape)} in the trainer and {list(spec.shape)} in the engine")
        elif spec.dtype is not None and got.dtype != spec.dtype:
            assert got.dtype is not None
            names = dtype_name(got.dtype), dtype_name(spec.dtype)
            problems.append(f"{name} is {names[0]} in the trainer and {names[1]} in the engine")
    if not problems:
        return None
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """bfloat16 -> torch.bfloat16; refuses what is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"{name!r} is no dtype")
    return dtype
