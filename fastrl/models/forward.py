"""Hidden rows of a packed micro-batch, gathered for the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from fastrl.models.double import keep_double
from fastrl.models.head import trunk
from fastrl.models.training_layout import Segment, TrainingLayout


class Packed(Protocol):
    """What a forward pass reads of a micro-batch (fastrl.data.packing.MicroBatch). U rows, N response tokens."""

    @property
    def input_ids(self) -> Tensor: ...  # [U]

    @property
    def position_ids(self) -> Tensor: ...  # [U]

    @property
    def segments(self) -> Sequence[Segment]: ...  # cover the U rows

    @property
    def head_index(self) -> Tensor: ...  # [N]


def trunk_rows(model: nn.Module, micro: Packed) -> Tensor:
    """All last hidden rows [U, H] of a micro-batch."""
    layout = TrainingLayout(micro.segments, micro.input_ids.device, getattr(model, "fastrl_attention", "auto"))
    with keep_double(model):
        output = trunk(model)(
            input_ids=micro.input_ids[None],
            position_ids=micro.position_ids[None],
            use_cache=False,
            fastrl_layout=layout,
        )
    return output.last_hidden_state[0]


def hidden_rows(model: nn.Module, micro: Packed) -> Tensor:
    """The rows [N, H] that predict the response tokens, in the order of `micro.labels`.

    This gather is the one place where index t (the sampled token) meets row t - 1. A prompt's last row predicts the
    first token of each of its responses and is gathered once per response.
    """
    return trunk_rows(model, micro)[micro.head_index]
