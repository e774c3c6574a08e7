"""The tensors of a model as an engine knows them: Hugging Face names, whole, gathered one bucket ahead.

A tensor that is sharded over ranks (a DTensor of FSDP2) is gathered in the type it travels in; every rank takes part and
gets the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fastrl.dist.weight_plan import Bucket, Part, Piece, TensorSpec
from fastrl.dist.weight_timeline import Timeline

LoraMode = Literal["merged", "adapter"]


@dataclass(frozen=True)
class Entry:
    """One tensor to send; `same_as` names the earlier one it is tied to."""

    name: str
    tensor: Tensor  # perhaps sharded
    same_as: str | None = None
    finish: Callable[[Tensor], Tensor] | None = None  # the whole tensor -> what is sent (merged adapters)


class ModelSource:
    """Parameters and persistent buffers of a module, in order.

    Args:
        model: the policy.
        dtype: type that float tensors travel in; None keeps each tensor's own.
        tied: also name the parameters that are tied to an earlier one.
        lora: what is sent of a model with adapters (PEFT's layout): `merged` sends each weight with its adapters added,
            under the plain model's names; `adapter` sends the adapters' matrices alone.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        tied: bool = False,
        lora: LoraMode = "merged",
    ) -> None:
        self.model, self.dtype, self.tied, self.lora = model, dtype, tied, lora

    def entries(self) -> list[Entry]:
        """All tensors; looked up anew, because optimizers and sharding may replace them."""
        from fastrl.dist.weight_lora import adapter_entries, has_adapters, merged_entries

        if not has_adapters(self.model):
            found: Iterator[Entry] = (Entry(name, tensor) for name, tensor in named_tensors(self.model))
        elif self.lora == "merged":
            found = merged_entries(self.model)
        else:
            found = adapter_entries(self.model)
        return list(self._once(found))

    def _once(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        seen: dict[int, str] = {}
        for entry in entries:
            first = seen.setdefault(id(entry.tensor), entry.name)
            if first == entry.name:
                yield entry
            elif self.tied:
                yield Entry(entry.name, entry.tensor, first)

    def specs(self, entries: list[Entry]) -> list[TensorSpec]:
        """The manifest of these entries."""
        return [TensorSpec(e.name, tuple(e.tensor.shape), self.wire_dtype(e.tensor), e.same_as) for e in entries]

    def wire_dtype(self, tensor: Tensor) -> torch.dtype:
        """The type a tensor travels in; integers keep theirs."""
        return self.dtype if self.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


class Gatherer:
    """Whole tensors, gathered ahead of their use. Every rank walks the same plan."""

    def __init__(self, entries: list[Entry], specs: list[TensorSpec], timeline: Timeline) -> None:
        self.entries, self.specs, self.timeline = entries, specs, timeline
        self.started: dict[int, Tensor] = {}
        self.flat: dict[int, Tensor] = {}

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
                    self.flat.pop(piece.index, None)

    @property
    def collective(self) -> bool:
        """Whether other ranks wait for this one."""
        return any(isinstance(entry.tensor, DTensor) for entry in self.entries)

    def start(self, bucket: Bucket) -> None:
        """Begin to gather; tensors under way are left alone."""
        for index in (piece.index for piece in bucket):
            if index not in self.started and index not in self.flat:
                dtype = self.specs[index].dtype if self.entries[index].finish is None else None
                self.started[index] = gather(self.entries[index].tensor, dtype)

    def _part(self, piece: Piece) -> Part:
        flat, dtype = self._take(piece.index), self.specs[piece.index].dtype
        assert dtype is not None
        return flat[piece.start : piece.start + piece.count], dtype, piece.offset

    def _take(self, index: int) -> Tensor:
        """The whole tensor, flat; its type may be wider than the one it travels in."""
        if index not in self.flat:
            whole, entry = wait(self.started.pop(index)), self.entries[index]
            self.flat[index] = (whole if entry.finish is None else entry.finish(whole)).reshape(-1)
        return self.flat[index]


def gather(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Begin to make a tensor whole; of a sharded one `dtype` is what goes over the network (None: its own)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    sharded: Any = tensor.detach()
    if dtype is not None and tensor.dtype.is_floating_point and dtype.itemsize < tensor.dtype.itemsize:
        sharded = sharded.to(dtype)
    mesh = tensor.device_mesh
    return sharded.redistribute(mesh, [Replicate()] * mesh.ndim, async_op=True).to_local()


def wait(tensor: Tensor) -> Tensor:
    """The finished tensor behind a collective that may still be under way."""
    unfinished: Any = getattr(tensor, "wait", None)
    return tensor if unfinished is None else unfinished()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers with every name they have, tied ones several times."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
