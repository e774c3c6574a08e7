"""Routers of mixture-of-experts models: which expert each row went to, and how likely the router found each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from fastrl.errors import ModelError
from fastrl.models.forward import Packed, trunk_output


@dataclass(frozen=True)
class Experts:
    """How many experts a layer has and how many of them a row goes to."""

    number: int
    per_row: int


def experts_of(config: PreTrainedConfig) -> Experts:
    """The experts of a model; ModelError for one without a router."""
    text = config.get_text_config()
    numbers = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    number, per_row = next((n for n in numbers if n), None), getattr(text, "num_experts_per_tok", None)
    if number is None or per_row is None:
        raise ModelError(
            f"algorithm.router_aux_coef is set, but {text.model_type} has no experts to balance: set it to 0"
        )
    return Experts(int(number), int(per_row))


def routed_rows(model: nn.Module, micro: Packed) -> tuple[Tensor, Tensor]:
    """Hidden rows [N, H] as `hidden_rows` gives them, and the router's probabilities of those rows [layers, N, E]."""
    output, num_rows = trunk_output(model, micro, output_router_logits=True)
    logits = output.get("router_logits")
    if not logits:
        raise ModelError(f"{type(model).__name__} gives no router logits: set algorithm.router_aux_coef to 0")
    rows = torch.stack([layer.reshape(-1, layer.shape[-1])[:num_rows][micro.head_index] for layer in logits])
    wide = torch.promote_types(rows.dtype, torch.float32)
    return output.last_hidden_state[0, :num_rows][micro.head_index], torch.softmax(rows.to(wide), -1)


def assignments(probabilities: Tensor, experts: Experts) -> Tensor:
    """How many rows each expert got over all layers: probabilities [layers, N, E] -> [E] float64."""
    chosen = probabilities.topk(experts.per_row, -1).indices.reshape(-1)
    return torch.bincount(chosen, minlength=experts.number).double()
