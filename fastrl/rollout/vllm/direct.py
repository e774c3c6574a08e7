"""New weights straight into the tensors of a vLLM model, by a plan that is made once.

vLLM's own loader makes every layer anew at each update: it looks names up, holds tensors back until a layer is
complete, allocates the layer, copies, and copies again into the tensors that compute. Where a model consists of plain
layers on one device, each checkpoint tensor is a run of rows of one of its tensors, and one copy is enough. On a CPU
the rows are put together in a scratch tensor, from which the layer packs its copy for the products.

The first update always goes through vLLM's loader. Meanwhile each tensor is multiplied by a fixed vector, and
afterwards the layers that were loaded are: only where each of them gives the products of its rows is the plan used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from fastrl.errors import EngineError

LINEAR = (QKVParallelLinear, MergedColumnParallelLinear, ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
EMBEDDINGS = (VocabParallelEmbedding, ParallelLMHead)
TOLERANCE = 0.02  # of the largest product, for bf16; layers that were exchanged differ by about 1


@dataclass(frozen=True)
class Place:
    """A checkpoint tensor is rows `first ... first + rows - 1` of `layer.leaf`."""

    layer: nn.Module
    leaf: str
    first: int
    rows: int


class DirectLoad:
    """Loads updates by a plan.

    Args:
        places: where each checkpoint tensor goes.
        packed: layers whose products read a packed copy of their weight, made anew after each update.
    """

    def __init__(self, places: dict[str, Place], packed: set[nn.Module]) -> None:
        self.places, self.packed = places, packed
        self.parts: dict[nn.Module, int] = {}  # number of tensors that make up a layer's weight
        for place in places.values():
            self.parts[place.layer] = self.parts.get(place.layer, 0) + (place.leaf == "weight")
        self._collecting: dict[nn.Module, Tensor] = {}  # rows that have come of layers which keep no plain weight
        self._scratch: dict[tuple[int, ...], list[Tensor]] = {}  # free ones, by shape

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor to its place. Raises EngineError when one has none, comes twice or did not come."""
        waiting, missing = set(self.places), dict(self.parts)
        before: tuple[Tensor, Tensor] | None = None  # the last copy: a tied tensor comes twice and is copied once
        for name, tensor in weights:
            if name not in waiting:
                raise EngineError(f"{name} has no place in the engine, or came twice")
            waiting.remove(name)
            place = self.places[name]
            target = self._target(place, tensor)
            if before is None or before[0] is not tensor or before[1].data_ptr() != target.data_ptr():
                target[place.first : place.first + place.rows].copy_(tensor)
                before = tensor, target
            if place.leaf == "weight":
                missing[place.layer] -= 1
                if not missing[place.layer] and place.layer in self.packed:
                    self._pack(place.layer, target)
        if waiting:
            raise EngineError(f"{len(waiting)} tensors did not come, among them {min(waiting)}")

    def _target(self, place: Place, tensor: Tensor) -> Tensor:
        """The engine's own tensor, or one that collects the rows of a layer which keeps only the packed copy."""
        own: Tensor = getattr(place.layer, place.leaf)
        if own.numel():
            return own.data
        if place.layer not in self._collecting:
            shape = (weight_rows(place.layer), *tensor.shape[1:])
            free = self._scratch.setdefault(shape, [])
            self._collecting[place.layer] = (
                free.pop() if free else torch.empty(shape, dtype=own.dtype, device=own.device)
            )
        return self._collecting[place.layer]

    def _pack(self, layer: Any, weight: Tensor) -> None:
        own = layer.weight
        layer.cpu_linear = None  # frees the former copy: the new one takes its memory
        if not own.numel():
            layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
        layer.weight = own
        if layer in self._collecting:
            self._scratch[tuple(weight.shape)].append(self._collecting.pop(layer))


class Proof:
    """What vLLM's own loader is given, in products with a fixed vector, for comparison with what it made of it."""

    def __init__(self, noting: bool = True) -> None:
        self.noting = noting
        self.products: dict[str, Tensor] = {}
        self.plain: dict[str, Tensor] = {}

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, noted down; copies, because the loader holds them back while the iterator goes on."""
        for name, tensor in weights:
            own = tensor.clone()
            if not self.noting:
                pass
            elif own.dim() == 2:
                self.products[name] = times_fixed(own)
            elif own.dim() == 1:
                self.plain[name] = own.clone()
            yield name, own

    def contradiction(self, places: dict[str, Place]) -> str | None:
        """The first tensor that is not where the plan has it, in words; None when all are."""
        for name, place in places.items():
            rows = slice(place.first, place.first + place.rows)
            if name in self.plain:
                want, have = self.plain[name], getattr(place.layer, place.leaf).data[rows]
            elif name in self.products:
                want, have = self.products[name], output_of(place.layer)[rows]
            else:
                return f"{name} was not loaded, or is no matrix"
            if have.shape != want.shape or not bool(
                (have.float() - want.float()).abs().max() <= TOLERANCE * want.float().abs().max()
            ):
                return f"vLLM makes something else of {name}"
        unknown = (self.products.keys() | self.plain.keys()) - places.keys()
        return f"{min(unknown)} has no place" if unknown else None


def plan_direct(model: Any, proof: Proof) -> DirectLoad | str:
    """The plan for a model that vLLM's loader has just loaded, or why there is none.

    Args:
        model: vLLM's.
        proof: what the loader was given.
    """
    places: dict[str, Place] = {}
    packed: set[nn.Module] = set()
    packing: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    has_head = any(type(m) is ParallelLMHead for m in model.modules())
    for prefix, layer in model.named_modules():
        problem = layer_problem(layer)
        if problem is not None:
            return f"{prefix}: {problem}"
        for leaf, parameter in layer._parameters.items():
            if parameter is not None:
                places |= {name: Place(layer, leaf, *rows) for name, *rows in names_of(prefix, layer, leaf, packing)}
        if hasattr(layer, "cpu_linear") and (type(layer) is not VocabParallelEmbedding or not has_head):
            packed.add(layer)  # an embedding beside a head makes no products
    wrong = proof.contradiction(places)
    return wrong if wrong is not None else DirectLoad(places, packed)


def layer_problem(layer: Any) -> str | None:
    """Why a layer's tensors cannot be written directly; None when they can, or when it has none."""
    own, kind = {name for name, p in layer._parameters.items() if p is not None}, type(layer)
    if kind in (*LINEAR, *EMBEDDINGS):
        method = UnquantizedLinearMethod if kind in LINEAR else UnquantizedEmbeddingMethod
        if type(layer.quant_method) is not method or not own <= {"weight", "bias"}:
            return "a quantised layer"
        return "split over processes" if layer.tp_size > 1 else None
    if kind is RMSNorm:
        return None if own <= {"weight"} else "an unknown norm"
    if own or (kind is not Attention and hasattr(layer, "process_weights_after_loading")):
        return f"a layer of another kind ({kind.__name__})"
    return None


def names_of(prefix: str, layer: Any, leaf: str, packing: dict[str, list[str]]) -> list[tuple[str, int, int]]:
    """(checkpoint name, first row, rows) of what makes up `layer.leaf`."""
    owner, _, last = prefix.rpartition(".")
    if last not in packing or not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):
        return [(f"{prefix}.{leaf}", 0, own_rows(layer, leaf))]
    named, first = [], 0
    for part, rows in zip(packing[last], layer.output_sizes, strict=True):
        named.append((f"{owner}.{part}.{leaf}", first, rows))
        first += rows
    return named


def own_rows(layer: Any, leaf: str) -> int:
    """Rows of the checkpoint's tensor; an engine may have more, filled with zeros."""
    if type(layer) in EMBEDDINGS:
        return int(layer.org_vocab_size)
    return weight_rows(layer) if type(layer) in LINEAR else int(getattr(layer, leaf).shape[0])


def weight_rows(layer: Any) -> int:
    """Rows of a linear layer's weight, which may be gone for its packed copy."""
    return int(sum(layer.output_partition_sizes))


def times_fixed(weight: Tensor) -> Tensor:
    """weight [R, C] times a fixed vector without symmetries -> [R]."""
    x = fixed(weight.shape[1], weight)
    return nn.functional.linear(x[None], weight)[0].float()


def fixed(size: int, like: Tensor) -> Tensor:
    """cos(i^1.5 + 1), i = 0 ... size - 1, in the type of `like`."""
    return torch.cos(torch.arange(size, device=like.device, dtype=torch.float32) ** 1.5 + 1).to(like.dtype)


def output_of(layer: Any) -> Tensor:
    """The layer's own product with the fixed vector, [rows]."""
    if type(layer) is VocabParallelEmbedding:
        return times_fixed(layer.weight.data)
    width = layer.input_size if type(layer) in LINEAR else layer.embedding_dim
    return layer.quant_method.apply(layer, fixed(width, layer.weight)[None], None)[0].float()
