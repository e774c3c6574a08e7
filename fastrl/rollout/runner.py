"""How hidden rows and logits come about during generation: the model's own forward pass, or a faster equal one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastrl.models.attention import IMPLEMENTATION
from fastrl.models.head import cap_logits, head_of, logits_of, trunk
from fastrl.rollout.layouts import RowsLayout
from fastrl.rollout.products import onednn_linear, onednn_takes


class Runner(Protocol):
    """Two calls per step: hidden rows, then the logits of some of them; the others concern copies of parameters."""

    def hidden(self, tokens: np.ndarray, positions: np.ndarray, layout: RowsLayout) -> Tensor:
        """tokens [U] int64, positions [U] int64 -> last hidden rows [U, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V], a new tensor that the caller may overwrite."""
        ...

    def expect(self, passes: int) -> None:
        """About so many forward passes follow before the parameters change: worth preparing for, or not."""
        ...

    def refresh(self) -> None:
        """The parameters have new values."""
        ...

    def prepare(self) -> None:
        """Every rank is here: gather now what takes all of them."""
        ...

    def release(self) -> None:
        """Free copies of parameters."""
        ...


class ModuleRunner:
    """The model's own modules, whatever they are: zero-copy and the reference for every other runner."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device

    def hidden(self, tokens: np.ndarray, positions: np.ndarray, layout: RowsLayout) -> Tensor:
        """See Runner."""
        output = trunk(self.model)(
            input_ids=torch.from_numpy(tokens).to(self.device)[None],
            position_ids=torch.from_numpy(positions).to(self.device)[None],
            use_cache=False,
            fastrl_layout=layout,
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See Runner."""
        head = head_of(self.model)
        if onednn_takes(hidden, head.weight):
            return cap_logits(onednn_linear(hidden, head.weight, head.bias), head)
        return logits_of(hidden, head)

    def expect(self, passes: int) -> None:
        """Nothing to prepare."""

    def refresh(self) -> None:
        """Nothing to do: the modules are the trainer's own."""

    def prepare(self) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Nothing to do."""


def uses_layouts(model: PreTrainedModel) -> bool:
    """Whether the model's attention is the one that takes layouts."""
    return model.config._attn_implementation == IMPLEMENTATION
