"""Low-rank adapters in PEFT's layout, seen as plain weights or alone. https://arxiv.org/abs/2106.09685

An adapted layer has `base_layer`, `lora_A[name]`, `lora_B[name]`, `scaling[name]` and `active_adapters`; the names of an
engine leave the wrapper's prefix `base_model.model.` and `base_layer` out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.dist.weight_source import Entry, gather, named_tensors, wait
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
            add = _merge(owner, adapted[owner])
            yield Entry(plain_name(name), tensor, finish=add)
        elif name.startswith(f"{owner}.base_layer."):
            yield Entry(plain_name(name), tensor)


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of `merged_entries`, one at a time; of a sharded model every rank takes part."""
    for entry in merged_entries(model):
        whole = wait(gather(entry.tensor, None))
        yield entry.name, whole if entry.finish is None else entry.finish(whole)


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


def _merge(owner: str, module: Any) -> Callable[[Tensor], Tensor]:
    active = _active(owner, module)
    disabled = bool(getattr(module, "disable_adapters", False)) or bool(getattr(module, "merged", False))

    def finish(weight: Tensor) -> Tensor:
        if disabled:
            return weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        total = weight.to(wide)
        for name in active:
            down, up = (wait(gather(getattr(module, part)[name].weight, None)) for part in ("lora_A", "lora_B"))
            delta = (up.to(wide) @ down.to(wide)) * module.scaling[name]
            total = total + (delta.T if getattr(module, "fan_in_fan_out", False) else delta)
        return total

    return finish
