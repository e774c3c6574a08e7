"""The tensors of a model as an engine knows them: Hugging Face names, whole, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastrl.dist.weight_plan import TensorSpec


@dataclass(frozen=True)
class Entry:
    """One tensor of the model, perhaps sharded; `same_as` names the earlier one it is tied to."""

    name: str
    tensor: Tensor
    same_as: str | None = None


class ModelSource:
    """Parameters and persistent buffers of a module, in order.

    Args:
        model: the policy.
        dtype: type that float tensors travel in; None keeps each tensor's own.
        tied: also name the parameters that are tied to an earlier one.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None, *, tied: bool = False) -> None:
        self.model, self.dtype, self.tied = model, dtype, tied

    def entries(self) -> list[Entry]:
        """All tensors; looked up anew, because optimizers and sharding may replace them."""
        seen: dict[int, str] = {}
        found = []
        for name, tensor in named_tensors(self.model):
            first = seen.setdefault(id(tensor), name)
            if first == name:
                found.append(Entry(name, tensor))
            elif self.tied:
                found.append(Entry(name, tensor, first))
        return found

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
