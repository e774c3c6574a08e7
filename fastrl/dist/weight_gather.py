"""Whole tensors out of sharded ones: one collective per bucket, under way while the bucket before is packed.

FSDP2 gives rank r the rows r c ... (r + 1) c - 1 of a tensor of n rows, c = ceil(n / ranks). The shards of all tensors of
a bucket are laid end to end and gathered at once; of what comes back, a tensor is one run of elements per rank, which
are packed from where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastrl.dist.weight_plan import Bucket, Part, Piece, TensorSpec
from fastrl.dist.weight_source import Entry
from fastrl.dist.weight_timeline import Timeline

# its name from torch 2.13 on; older ones know the other, which warns there
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Runs = list[Tensor]  # elements of a whole tensor, flat, in order
Key = tuple[int, int]  # number of the entry; 0 its own tensor, 1 ... those that `finish` wants beside it


class Gatherer:
    """Whole tensors, gathered ahead of their use. Every rank walks the same plan."""

    def __init__(self, entries: list[Entry], specs: list[TensorSpec], timeline: Timeline) -> None:
        self.entries, self.specs, self.timeline = entries, specs, timeline
        self.begun: set[int] = set()
        self.under_way: dict[Key, Flat | Single] = {}
        self.whole: dict[int, Runs] = {}

    def walk(self, plan: Sequence[Bucket]) -> Iterator[tuple[Bucket, list[Part]]]:
        """Each bucket with what goes into it; the gathering of the next one is under way meanwhile."""
        for number, bucket in enumerate(plan):
            with self.timeline.span("gather", number):
                for ahead in plan[number : number + 2]:
                    self.start(ahead)
                parts = [self._part(piece) for piece in bucket]
            yield bucket, parts
            for piece in bucket:
                if piece.start + piece.count == self.specs[piece.index].numel:
                    self.whole.pop(piece.index, None)

    @property
    def collective(self) -> bool:
        """Whether other ranks wait for this one."""
        return any(isinstance(tensor, DTensor) for entry in self.entries for tensor in (entry.tensor, *entry.beside))

    def start(self, bucket: Bucket) -> None:
        """Begin to gather; tensors that were begun before are left alone."""
        wanted: list[tuple[Key, Tensor, torch.dtype]] = []
        for index in (piece.index for piece in bucket):
            if index not in self.begun:
                self.begun.add(index)
                entry = self.entries[index]
                for place, tensor in enumerate((entry.tensor, *entry.beside)):
                    narrow = self.specs[index].dtype if entry.finish is None else None
                    wanted.append(((index, place), tensor.detach(), travelling(tensor, narrow)))
        self.under_way |= begin(wanted)

    def _part(self, piece: Piece) -> Part:
        dtype = self.specs[piece.index].dtype
        assert dtype is not None
        if piece.index not in self.whole:
            self.whole[piece.index] = self._finished(piece.index)
        return cut(self.whole[piece.index], piece.start, piece.count), dtype, piece.offset

    def _finished(self, index: int) -> Runs:
        """The whole tensor; its type may be wider than the one it travels in."""
        entry = self.entries[index]
        runs = [self.under_way.pop((index, place)).runs((index, place)) for place in range(1 + len(entry.beside))]
        if entry.finish is None:
            return runs[0]
        whole = [joined(r, t.shape) for r, t in zip(runs, (entry.tensor, *entry.beside), strict=True)]
        return [entry.finish(*whole).reshape(-1)]


class Single:
    """A tensor that needs no gathering, or is gathered by itself because of how it is sharded."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        if isinstance(tensor, DTensor):
            sharded: Any = tensor.to(dtype)
            mesh = tensor.device_mesh
            self.tensor = sharded.redistribute(mesh, [Replicate()] * mesh.ndim, async_op=True).to_local()

    def runs(self, key: Key) -> Runs:
        """The whole."""
        unfinished: Any = getattr(self.tensor, "wait", None)
        whole: Tensor = self.tensor if unfinished is None else unfinished()
        return [whole.reshape(-1)]


@dataclass(frozen=True)
class Member:
    """A tensor in a flat gather: `rows` of `width` elements, `chunk` rows a rank, at element `offset` of each rank."""

    rows: int
    width: int
    chunk: int
    offset: int


class Flat:
    """One collective for the shards of many tensors of one type, in one group of ranks."""

    def __init__(self, tensors: Sequence[tuple[Key, DTensor]], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self.size = dist.get_world_size(group)
        self.members: dict[Key, Member] = {}
        total = 0
        for key, tensor in tensors:
            rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
            chunk = -(-rows // self.size)
            self.members[key] = Member(rows, width, chunk, total)
            total += chunk * width
        device = tensors[0][1].to_local().device
        self.mine = torch.empty(total, dtype=dtype, device=device)  # kept until the collective is over
        for key, tensor in tensors:
            local, offset = tensor.to_local(), self.members[key].offset
            self.mine[offset : offset + local.numel()].copy_(local.reshape(-1))
        self.all = torch.empty(self.size, total, dtype=dtype, device=device)
        self.work: Any = _all_gather(self.all.view(-1), self.mine, group=group, async_op=True)

    def runs(self, key: Key) -> Runs:
        """One run of elements per rank that has any."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        m = self.members[key]
        counts = [max(0, min(m.chunk, m.rows - r * m.chunk)) * m.width for r in range(self.size)]
        return [self.all[r, m.offset : m.offset + count] for r, count in enumerate(counts) if count]


def begin(wanted: Iterable[tuple[Key, Tensor, torch.dtype]]) -> dict[Key, Flat | Single]:
    """Start to make tensors whole; `dtype` is what goes over the network."""
    found: dict[Key, Flat | Single] = {}
    together: dict[tuple[Any, torch.dtype], list[tuple[Key, DTensor]]] = {}
    for key, tensor, dtype in wanted:
        dim = row_sharded(tensor)
        if dim is None or not isinstance(tensor, DTensor):
            found[key] = Single(tensor, dtype)
        else:
            together.setdefault((tensor.device_mesh.get_group(dim), dtype), []).append((key, tensor))
    for (group, dtype), members in together.items():
        flat = Flat(members, dtype, group)
        found |= dict.fromkeys((key for key, _ in members), flat)
    return found


def row_sharded(tensor: Tensor) -> int | None:
    """The mesh dimension over which a tensor's rows are sharded, when that is all that is done to it."""
    if not isinstance(tensor, DTensor) or tensor.numel() == 0:
        return None
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return split[0] if len(split) == 1 and tensor.placements[split[0]] == Shard(0) else None


def travelling(tensor: Tensor, narrow: torch.dtype | None) -> torch.dtype:
    """The type that goes over the network: the one it is sent in, where that is the smaller one."""
    smaller = narrow is not None and tensor.dtype.is_floating_point and narrow.itemsize < tensor.dtype.itemsize
    return narrow if smaller and narrow is not None else tensor.dtype


def cut(runs: Runs, start: int, count: int) -> Runs:
    """Elements start ... start + count - 1."""
    found, at = [], 0
    for run in runs:
        first, last = max(start - at, 0), min(start + count - at, run.numel())
        if first < last:
            found.append(run[first:last])
        at += run.numel()
    return found or [runs[0][:0]]


def joined(runs: Runs, shape: Sequence[int]) -> Tensor:
    """The tensor itself; a copy where it lies in several runs."""
    return (runs[0] if len(runs) == 1 else torch.cat(runs)).view(torch.Size(shape))


def whole(tensor: Tensor, *beside: Tensor) -> list[Tensor]:
    """Whole tensors, at once; of sharded ones every rank takes part."""
    tensors = [tensor, *beside]
    keys: list[Key] = [(0, place) for place in range(len(tensors))]
    found = begin((key, t.detach(), t.dtype) for key, t in zip(keys, tensors, strict=True))
    return [joined(found[key].runs(key), t.shape) for key, t in zip(keys, tensors, strict=True)]
