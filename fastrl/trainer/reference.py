"""The frozen starting policy: a model of its own that waits in CPU memory, or the policy with its adapters off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastrl.dist.fsdp import resident
from fastrl.models.lora import adapters_off
from fastrl.trainer.actor import PolicyModel


class Reference(PolicyModel):
    """A second model, whole or sharded, on the GPU only while it computes where `offload` is set."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, offload: bool, temperature: float, dtype: torch.dtype
    ) -> None:
        super().__init__(model, temperature=temperature, dtype=dtype)
        self.device, self.offload = device, offload
        with resident(model, device, offload=offload):
            pass

    def log_prob(self, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        """See PolicyModel."""
        with resident(self.model, self.device, offload=self.offload):
            return super().log_prob(*arguments, **options)


class WithoutAdapters(PolicyModel):
    """The policy's own model with its adapters off: no second model is loaded."""

    def log_prob(self, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        """See PolicyModel."""
        with adapters_off(self.model):
            return super().log_prob(*arguments, **options)
