"""The decoder layers of a model: the units of sharding and of compilation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AttentionInterface

from fastrl.errors import ModelError
from fastrl.models.attention import IMPLEMENTATION, attention_forward
from fastrl.models.head import trunk


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer for any number of rows; attention stays outside, it follows the layout of a batch.

    Call it before sharding, so that gathering weights stays outside too.
    """
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attention_forward))
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers, in order. Raises ModelError when the model does not name their class."""
    base = trunk(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    layers = [module for module in base.modules() if type(module).__name__ in names]
    layers = [layer for layer in layers if not any(layer is not other and layer in _inside(other) for other in layers)]
    if not layers:
        raise ModelError(
            f"{type(base).__name__} does not name its decoder layers: it cannot be sharded, set parallel.shard = 1"
        )
    return layers


def _inside(module: nn.Module) -> set[nn.Module]:
    return set(module.modules())
