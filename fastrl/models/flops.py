"""Floating-point operations of a forward pass, from the model's parameters and configuration.

A product with a weight of n entries is 2 n operations per row. Per row of the trunk: 2 x the entries of its matrices
(embeddings are look-ups; of E experts, k of which serve a row, k / E count). Per key that a row reads: 2 D for the
score and 2 D for the weighted sum, in each query head and layer, that is 4 L Hq D. Per row of the head: 2 V H. Norms,
activations, rotations and softmax are left out, sliding windows are counted as full attention. A backward pass is two
forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fastrl.models.head import trunk

# Dense peak in operations per second with 16-bit inputs, from the vendors' data sheets (without sparsity).
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
}


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in configurations


class Work(Protocol):
    """What a pass computes (fastrl.data.packing.MicroBatch)."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_keys(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass: per trunk row, per key a row reads, per head row."""

    row: float
    key: float
    head_row: float
    trainable: float = 1.0  # share of the trunk's weights that get gradients (adapters: few)

    def forward(self, work: Work) -> float:
        """A forward pass."""
        return self.row * work.num_rows + self.key * work.num_keys + self.head_row * work.num_tokens

    def update(self, work: Work) -> float:
        """Forward and backward: the gradient of the rows costs a forward pass, that of trained weights another.

        What is computed a second time (checkpointed layers, a head run again in the backward) is no model work.
        """
        weights = self.row * work.num_rows + self.head_row * work.num_tokens
        return self.forward(work) * 2.0 + self.trainable * weights + self.key * work.num_keys


def forward_flops(model: nn.Module) -> ForwardFlops:
    """The figures of a causal language model, or of a value model (one output per row)."""
    base = trunk(model)
    config: Any = model.config
    text = config.get_text_config()
    embeddings = {id(m.weight) for m in base.modules() if isinstance(m, nn.Embedding)}
    experts = next((n for name in EXPERT_COUNTS if (n := getattr(text, name, None))), 1)
    share = (getattr(text, "num_experts_per_tok", None) or experts) / experts
    weights = trained = 0.0
    for name, parameter in base.named_parameters():
        if parameter.dim() >= 2 and id(parameter) not in embeddings:
            entries = parameter.numel() * (share if ".experts." in name else 1.0)
            weights += entries
            trained += entries if parameter.requires_grad else 0.0
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_dim = getattr(text, "qk_head_dim", None) or head_dim
    value_dim = getattr(text, "v_head_dim", None) or head_dim
    outputs = 1 if hasattr(model, "value_head") else text.vocab_size
    return ForwardFlops(
        row=2.0 * weights,
        key=2.0 * text.num_hidden_layers * heads * (key_dim + value_dim),
        head_row=2.0 * outputs * text.hidden_size,
        trainable=trained / weights if weights else 1.0,
    )


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit peak of a GPU by its name, operations per second; None where it is not known, and on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if all(part in name for part in key.split())), None)
