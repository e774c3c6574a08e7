"""Hidden rows of a packed micro-batch, gathered for the head.

Sharded weights are whole only inside the forward pass of the module that owns them, so what is done with hidden
rows and with the head is handed in as a function: `inside` and `inside_head` call it in the right place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from fastrl.models.attention import AttentionLayout
from fastrl.models.double import keep_double
from fastrl.models.head import HeadParameters, head_of, trunk
from fastrl.models.sequence_parallel import SequenceGroup, SequenceParallelLayout
from fastrl.models.training_layout import Segment, StandInLayout, TrainingLayout

Result = TypeVar("Result")


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


def sequence_group(model: nn.Module) -> SequenceGroup | None:
    """The ranks that share this model's micro-batches, if there are several."""
    return getattr(model, "fastrl_sequence", None)


def trunk_output(model: nn.Module, micro: Packed, **more: Any) -> tuple[Any, int]:
    """The trunk's output for a micro-batch, and how many of its rows count; `more` goes to its forward.

    Models cannot run without a row. Where there is none (a rank that has fewer micro-batches than others takes part in
    their passes) one row stands in: it reads nothing, is read by nothing, and is cut off again.
    """
    layout: AttentionLayout = TrainingLayout(
        micro.segments, micro.input_ids.device, getattr(model, "fastrl_attention", "auto")
    )
    input_ids, position_ids = micro.input_ids, micro.position_ids
    if (ranks := sequence_group(model)) is not None:
        layout = SequenceParallelLayout(layout, input_ids.numel(), ranks)
        input_ids, position_ids = ranks.own(input_ids), ranks.own(position_ids)
    if (num_rows := input_ids.numel()) == 0:
        layout = StandInLayout(layout)
        input_ids = position_ids = input_ids.new_zeros(1)
    with keep_double(model):
        output = trunk(model)(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            fastrl_layout=layout,
            **more,
        )
    return output, num_rows


def trunk_rows(model: nn.Module, micro: Packed) -> Tensor:
    """All last hidden rows [U, H] of a micro-batch; under sequence parallelism the rows of this rank."""
    output, num_rows = trunk_output(model, micro)
    return output.last_hidden_state[0, :num_rows]


def hidden_rows(model: nn.Module, micro: Packed) -> Tensor:
    """The rows [N, H] that predict the response tokens, in the order of `micro.labels`.

    This gather is the one place where index t (the sampled token) meets row t - 1. A prompt's last row predicts the
    first token of each of its responses and is gathered once per response. Under sequence parallelism `micro` has been
    reduced to this rank's head rows (`fastrl.trainer.sequence`).
    """
    return trunk_rows(model, micro)[micro.head_index]


def inside(module: nn.Module, function: Callable[..., Result], *tensors: Tensor) -> Result:
    """`function` of tensors, inside the forward pass of `module`: its sharded weights are whole there.

    Every rank calls it equally often and in the same order. What needs a gradient is among the results, in tuples at
    most.
    """
    sharded = getattr(module, "sharded_call", None)
    return function(*tensors) if sharded is None else sharded(function, *tensors)


def inside_head(model: Any, function: Callable[[Tensor, HeadParameters], Result], hidden: Tensor) -> Result:
    """`function` of hidden rows [N, H] and the head's whole parameters; call it `inside` the model."""
    return inside(model.get_output_embeddings(), lambda rows: function(rows, head_of(model)), hidden)
