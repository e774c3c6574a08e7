"""How an engine lays out a dense decoder's weights, and where the trainer's tensors lie inside.

    qkv_proj = [q_proj; k_proj; v_proj]      gate_up_proj = [gate_proj; up_proj]      (rows, one behind the other)

Embedding and head have their rows filled up to a multiple of 64. On one rank every Hugging Face tensor is then a run of
whole rows of an engine tensor, so that both can be the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.dist.weight_plan import TensorSpec
from fastrl.errors import WeightError

ARENA_ALIGN = 512  # bytes
VOCABULARY_MULTIPLE = 64
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Rows:
    """The trainer's tensor `name` is rows `first ... first + shape[0] - 1` of an engine tensor."""

    name: str
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineTensor:
    """One tensor of the engine at byte `offset` of the common memory."""

    name: str
    shape: tuple[int, ...]
    offset: int
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class FusedLayout:
    """All engine tensors in one block of memory of `num_bytes`; `aliases` are tied names of the engine."""

    tensors: tuple[EngineTensor, ...]
    aliases: dict[str, str]
    dtype: torch.dtype
    num_bytes: int

    def engine_views(self, memory: Tensor) -> dict[str, Tensor]:
        """The engine's tensors in `memory` [num_bytes] uint8, tied names included."""
        views = {tensor.name: self._view(memory, tensor) for tensor in self.tensors}
        return views | {alias: views[name] for alias, name in self.aliases.items()}

    def trainer_views(self, memory: Tensor) -> dict[str, Tensor]:
        """The trainer's tensors in `memory`, by Hugging Face name."""
        views = {}
        for tensor in self.tensors:
            whole = self._view(memory, tensor)
            for rows in tensor.rows:
                views[rows.name] = whole[rows.first : rows.first + rows.shape[0]] if rows.shape else whole
        return views

    def engine_specs(self) -> list[TensorSpec]:
        """Names, shapes and types of the engine's tensors."""
        return [TensorSpec(tensor.name, tensor.shape, self.dtype) for tensor in self.tensors]

    def _view(self, memory: Tensor, tensor: EngineTensor) -> Tensor:
        size = math.prod(tensor.shape) * self.dtype.itemsize
        return memory[tensor.offset : tensor.offset + size].view(self.dtype).view(tensor.shape)


def fused_layout(specs: Sequence[TensorSpec], dtype: torch.dtype) -> FusedLayout:
    """The engine's layout of a dense decoder (Llama, Qwen2, Qwen3, Mistral and their like) on one rank.

    Args:
        specs: the trainer's tensors, tied ones with `same_as`; their own types do not matter.
        dtype: the engine's type.

    Raises:
        WeightError: a tensor has no known place (integer tensors, half a fused group).
    """
    shapes = {spec.name: spec.shape for spec in specs if spec.same_as is None}
    for spec in specs:
        if spec.dtype is not None and not spec.dtype.is_floating_point:
            raise WeightError(f"{spec.name} is {spec.dtype}: only float weights can be shared in place")
    tensors, offset = [], 0
    for name, parts in _groups(shapes).items():
        rows, first = [], 0
        for part in parts:
            rows.append(Rows(part, first, shapes[part]))
            first += shapes[part][0] if shapes[part] else 1
        shape = shapes[parts[0]]
        if name.endswith(PADDED):
            first = -(-first // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        tensors.append(EngineTensor(name, (first, *shape[1:]) if shape else (), offset, tuple(rows)))
        size = math.prod(tensors[-1].shape) * dtype.itemsize
        offset += -(-size // ARENA_ALIGN) * ARENA_ALIGN
    aliases = {spec.name: spec.same_as for spec in specs if spec.same_as is not None}
    return FusedLayout(tuple(tensors), aliases, dtype, offset)


def _groups(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """Engine name -> the trainer's tensors in it, in the trainer's order."""
    fused_by_part = {part: fused for fused, parts in FUSED.items() for part in parts}
    groups: dict[str, tuple[str, ...]] = {}
    for name in shapes:
        prefix, _, leaf = name.rpartition(".")
        owner, _, part = prefix.rpartition(".")
        fused = fused_by_part.get(part)
        if fused is None:
            groups[name] = (name,)
            continue
        engine = f"{owner}.{fused}.{leaf}"
        if engine not in groups:
            members = tuple(f"{owner}.{other}.{leaf}" for other in FUSED[fused])
            missing = [member for member in members if member not in shapes]
            if missing:
                raise WeightError(f"{name} belongs to {engine}, but there is no {missing[0]}")
            if len({shapes[member][1:] for member in members}) > 1:
                raise WeightError(f"the parts of {engine} have different widths")
            groups[engine] = members
    return groups


def sharing_problem(names: Iterable[str], world_size: int, *, adapters: bool, sharded: bool) -> str | None:
    """Why the weights cannot be the engine's own memory, in words; None when they can."""
    if world_size > 1:
        return f"{world_size} ranks: the engine's tensors are the trainer's on one rank only"
    if sharded:
        return "the weights are sharded"
    if adapters:
        return "the model has adapters, which the engine adds itself"
    experts = [name for name in names if ".experts." in name]
    if experts:
        return f"{experts[0]}: experts are laid out differently in the engine"
    return None
