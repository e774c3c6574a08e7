"""The tensors of a model as an engine knows them, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fastrl.dist.weight_plan import TensorSpec

LoraMode = Literal["merged", "adapter"]


@dataclass(frozen=True)
class Entry:
    """One tensor to send; `same_as` names the earlier one it is tied to."""

    name: str
    tensor: Tensor  # perhaps sharded
    same_as: str | None = None
    finish: Callable[..., Tensor] | None = None  # the whole tensor, those beside it -> what is sent (merged adapters)
    beside: tuple[Tensor, ...] = ()  # what `finish` needs, perhaps sharded


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


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers with every name they have, tied ones several times."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
