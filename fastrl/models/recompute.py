"""Recomputing activations in the backward pass instead of keeping them: which layers, and what of them stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from fastrl.models.double import KeepDouble
from fastrl.models.head import trunk

_aten = torch.ops.aten
# Linear layers and fused attention cost most of a layer's time; the rest is cheap to compute again. Batched products
# are not among them: attention in tiles works on their results in place.
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    PRODUCTS.add(torch.ops.mkldnn._linear_pointwise.default)


def recompute_layers(model: PreTrainedModel, *, every: int = 1, keep: str = "nothing") -> None:
    """Let decoder layers recompute their activations in the backward pass; gradients stay the same to the bit.

    Args:
        model: gets into training mode, which its layers ask for (every dropout is off).
        every: recompute one layer in so many, from the first on.
        keep: `nothing` of a recomputed layer, or its `products` (of linear layers, and fused attention).
    """
    context = partial(_contexts, model.dtype == torch.float64, keep)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    layers = [m for m in _layers(trunk(model)) if getattr(m, "gradient_checkpointing", False)]
    for index, layer in enumerate(layers):
        if index % every:
            layer.gradient_checkpointing = False  # type: ignore[assignment]
    model.train()


def _layers(base: nn.Module) -> Iterator[nn.Module]:
    for module in base.modules():
        if isinstance(module, nn.ModuleList):
            yield from (child for child in module if hasattr(child, "gradient_checkpointing"))


def _contexts(double: bool, keep: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the forward pass and of its repetition, which recomputes in float64 what was so before."""
    first: AbstractContextManager[Any]
    second: AbstractContextManager[Any]
    first, second = nullcontext(), nullcontext()
    if keep == "products":
        first, second = create_selective_checkpoint_contexts(_policy)
    return first, _both(second, KeepDouble() if double else nullcontext())


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
