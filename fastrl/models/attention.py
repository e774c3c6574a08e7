"""Attention over packed streams, plugged into any Hugging Face model as the attention implementation "fastrl".

The model is called with `fastrl_layout=`, an object that knows who attends to whom; transformers hands the keyword down
to the attention function, which calls `layout.attend`. Nothing is global, so gradient checkpointing can replay a layer.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from fastrl.errors import ModelError

IMPLEMENTATION = "fastrl"

# Keywords that reach attention functions and change nothing for a layout.
_HARMLESS = frozenset(
    [
        "dropout",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "is_causal",
        "logits_to_keep",
        "past_key_values",
        "layer_idx",
        "return_dict",
        "output_router_logits",
    ]
)


class AttentionLayout(Protocol):
    """Who attends to whom in a packed stream of U tokens."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [1, Hq, U, D], key and value [1, Hkv, U, D] -> output [1, U, Hq, D].

        `module` is the model's attention layer (its `layer_idx` finds a cache). A query at position p reads a key at
        position k only if p - k < sliding_window; softcap c turns a score s into c tanh(s / c); sinks [Hq] are the
        logits of one extra key per head that has no value.
        """


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    fastrl_layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in each attention layer; what it does not understand it refuses by name."""
    name = type(module).__name__
    if fastrl_layout is None:
        raise ModelError(
            f"{name}: the attention implementation 'fastrl' needs the keyword fastrl_layout, and it did not arrive. "
            "Call model.set_attn_implementation('sdpa') to run the model without a layout"
        )
    if attention_mask is not None:
        raise ModelError(f"{name} adds a mask or bias of its own (ALiBi, relative positions) to its attention scores")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ModelError(f"{name} is not causal: a layout computes causal self-attention only")
    for keyword, argument in kwargs.items():
        if argument is not None and keyword not in _HARMLESS:
            raise ModelError(f"{name} passes `{keyword}` to its attention, which fastrl does not know how to apply")
    output = fastrl_layout.attend(
        module,
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output, None


def register() -> None:
    """Make "fastrl" known to transformers (done when this module is imported).

    No function for masks is registered: transformers then makes none. With one it would look for packed sequences in
    the position ids first, which waits for the device in every pass and fails on a stream without rows.
    """
    AttentionInterface.register(IMPLEMENTATION, attention_forward)


register()
