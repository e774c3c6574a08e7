"""A causal LM in two parts: the trunk that makes hidden rows, and the head's parameters for the fused head kernels.

logits = cap(logit_scale * (hidden weight^T + bias)),    cap(z) = logit_softcap * tanh(z / logit_softcap)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastrl.errors import ModelError


@dataclass(frozen=True)
class HeadParameters:
    """Everything between a hidden row and its logits. V vocabulary, H hidden size."""

    weight: Tensor  # [V, H], the model's own parameter (tied or not)
    bias: Tensor | None  # [V]
    logit_scale: float  # factor on the logits, 1.0 for most models
    logit_softcap: float | None  # bound of the tanh cap that comes after the factor


def trunk(model: nn.Module) -> nn.Module:
    """The module that maps input ids to `last_hidden_state`: the model without its head."""
    base = getattr(model, str(model.base_model_prefix), None)
    if not isinstance(base, nn.Module):
        raise ModelError(f"{type(model).__name__} has no base model under `{model.base_model_prefix}`")
    return base


def head_of(model: PreTrainedModel) -> HeadParameters:
    """The head of `model`; read it anew for each forward pass, parameters may be replaced by sharding or loading.

    `logit_scale` multiplies (Cohere), `logits_scaling` divides (Granite), `final_logit_softcapping` caps (Gemma 2).
    That nothing else happens to the logits is checked with numbers when the model is loaded.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"{type(model).__name__}: the head is {type(linear).__name__}, expected one torch.nn.Linear")
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    softcap = getattr(config, "final_logit_softcapping", None)
    return HeadParameters(
        weight=linear.weight,
        bias=linear.bias,
        logit_scale=(1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor)),
        logit_softcap=None if softcap is None else float(softcap),
    )


def logits_of(hidden: Tensor, head: HeadParameters) -> Tensor:
    """hidden [..., H] -> logits [..., V]: for a few rows (decoding, tests); training uses the fused head."""
    return cap_logits(nn.functional.linear(hidden, head.weight, head.bias), head)


def cap_logits(logits: Tensor, head: HeadParameters) -> Tensor:
    """hidden weight^T + bias [..., V] -> logits [..., V]: the factor and the cap of the models that have them."""
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    if head.logit_softcap is not None:
        logits = torch.tanh(logits / head.logit_softcap) * head.logit_softcap
    return logits
