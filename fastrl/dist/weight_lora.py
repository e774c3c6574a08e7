"""Low-rank adapters in PEFT's layout, seen as plain weights or alone. https://arxiv.org/abs/2106.09685

An adapted layer has `base_layer`, `lora_A[name]`, `lora_B[name]`, `scaling[name]` and `active_adapters`; the names of an
engine leave the wrapper's prefix `base_model.model.` and `base_layer` out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.dist.weight_source import Entry, named_tensors
from fastrl.errors import WeightError

WRAPPER = "base_model.model."
_UNKNOWN = ("lora_embedding_A", "lora_magnitude_vector")


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of the model carries adapters."""
    return any(is_adapted(module) for module in model.modules())


def is_adapted(module: nn.Module) -> bool:
    """Whether a layer carries adapters."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def merged_entries(model: nn.Module) -> Iterator[Entry]:
    """The plain model's tensors; adapted weights are W + sum over active adapters of scaling B A, summed in float32."""
    adapted = {name: module for name, module in model.named_modules() if is_adapted(module)}
    for name, tensor in named_tensors(model):
        owner = next((o for o in adapted if name.startswith(f"{o}.")), None)
        if owner is None:
            yield Entry(plain_name(name), tensor)
        elif name == f"{owner}.base_layer.weight":
            add, matrices = _merge(owner, adapted[owner])
            yield Entry(plain_name(name), tensor, finish=add, beside=matrices)
        elif name.startswith(f"{owner}.base_layer."):
            yield Entry(plain_name(name), tensor)


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of `merged_entries`, one at a time; of a sharded model every rank takes part."""
    from fastrl.dist.weight_gather import whole

    for entry in merged_entries(model):
        tensors = whole(entry.tensor, *entry.beside)
        yield entry.name, tensors[0] if entry.finish is None else entry.finish(*tensors)


def adapter_entries(model: nn.Module) -> Iterator[Entry]:
    """The matrices of the one active adapter, as PEFT saves them: `...q_proj.lora_A.weight`."""
    for owner, module in model.named_modules():
        if not is_adapted(module):
            continue
        active = _active(owner, module)
        if len(active) > 1:
            raise WeightError(f"{owner} has the active adapters {', '.join(active)}: an engine takes one at a time")
        for name in active:
            for part in ("lora_A", "lora_B"):
                layer = getattr(module, part)[name]
                yield Entry(f"{owner}.{part}.weight", layer.weight)
                if layer.bias is not None:
                    yield Entry(f"{owner}.{part}.bias", layer.bias)


def plain_name(name: str) -> str:
    """A tensor's name in the model without adapters."""
    return name.removeprefix(WRAPPER).replace(".base_layer.", ".")


def _active(owner: str, module: Any) -> list[str]:
    names = [name for name in module.active_adapters if name in module.lora_A]
    for part in _UNKNOWN:
        if any(name in (getattr(module, part, None) or {}) for name in module.active_adapters):
            raise WeightError(f"{owner} has {part}, which cannot be sent: use plain LoRA on linear layers")
    return names


def _merge(owner: str, module: Any) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """What makes W + sum of scaling B A of the whole W, A, B, A, B ...; and these A and B."""
    active = _active(owner, module)
    if getattr(module, "disable_adapters", False) or getattr(module, "merged", False):
        active = []

    def finish(weight: Tensor, *matrices: Tensor) -> Tensor:
        if not matrices:
            return weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        total = weight.to(wide)
        for name, down, up in zip(active, matrices[::2], matrices[1::2], strict=True):
            delta = (up.to(wide) @ down.to(wide)) * module.scaling[name]
            total = total + (delta.T if getattr(module, "fan_in_fan_out", False) else delta)
        return total

    return finish, tuple(getattr(module, part)[name].weight for name in active for part in ("lora_A", "lora_B"))
