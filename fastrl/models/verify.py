"""Checks that a loaded model computes under fastrl what it computes by itself; everything else is refused by name.

Names catch what is known not to fit. A probe catches the rest: a few tokens go through the model with its own attention
and through the packed layout with a shared prompt, and the numbers must agree, up to the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastrl.errors import ModelError
from fastrl.models.attention import IMPLEMENTATION
from fastrl.models.double import keep_double
from fastrl.models.head import head_of, logits_of, trunk
from fastrl.models.training_layout import Segment, TrainingLayout

ATTENTION_LAYERS = frozenset(["full_attention", "sliding_attention"])
TOLERANCE = {
    torch.float32: 1e-3,
    torch.float64: 1e-9,
}  # of a row's difference over its norm; a wrong model is off by > 0.1


def refuse_by_name(config: PreTrainedConfig, path: str) -> None:
    """Raise ModelError for architectures whose configuration says that packed training would not be exact."""
    text = config.get_text_config()
    kind = f"model.path = {path}: {config.model_type}"
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{kind} is quantised: its weights cannot be trained; use the unquantised model")
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} is an encoder-decoder; fastrl trains decoder-only models")
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi":
        raise ModelError(f"{kind} uses ALiBi, a bias on attention scores that the packed layout does not compute")
    other = sorted(set(_layer_types(text)) - ATTENTION_LAYERS)
    if other:
        why = "attention in fixed chunks" if other == ["chunked_attention"] else "a state that runs along the stream"
        raise ModelError(
            f"{kind} has layers of type {', '.join(other)}: {why} would mix a packed response with its neighbours "
            "(full and sliding-window attention are exact)"
        )
    if getattr(text, "output_router_logits", False):
        raise ModelError(
            f"{kind} asks for its router's auxiliary loss (output_router_logits = true) in every forward; set it to "
            "false in config.json and its weight in algorithm.router_aux_coef"
        )


def _layer_types(config: PreTrainedConfig) -> Sequence[str]:
    found = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return ["full_attention" if t == "attention" else t for t in found]


@dataclass(frozen=True)
class _Call:
    sliding_window: int | None
    softcap: float | None


class _Recorder:
    """A layout that notes which attention layers call it and with what."""

    def __init__(self, inner: TrainingLayout) -> None:
        self.inner = inner
        self.calls: dict[nn.Module, _Call] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.calls[module] = _Call(options["sliding_window"], options["softcap"])
        return self.inner.attend(module, query, key, value, **options)


@torch.no_grad()
def verify(model: PreTrainedModel, path: str) -> None:
    """Run the probe; raises ModelError that names the architecture and what does not hold."""
    kind = f"model.path = {path}: {type(model).__name__}"
    device = next(model.parameters()).device
    # a prompt and two responses, in one stream that shares it and as two sequences by themselves
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (12,), generator=generator).to(device)
    segments: list[Segment] = [(0, 5, ()), (5, 9, ((0, 5),)), (9, 12, ((0, 5),))]
    positions = torch.tensor([*range(5), *range(5, 9), *range(5, 8)], device=device)
    recorder = _Recorder(TrainingLayout(segments, device))
    with keep_double(model):
        packed = _packed_rows(model, ids, positions, recorder, kind)
        _check_calls(model, recorder, kind)
        with _own_attention(model):
            alone = [
                trunk(model)(input_ids=torch.cat([ids[:5], r])[None], use_cache=False) for r in (ids[5:9], ids[9:])
            ]
    rows = torch.cat([alone[0].last_hidden_state[0], alone[1].last_hidden_state[0, 5:]])
    error = _difference(packed, rows)
    if error > TOLERANCE[rows.dtype]:
        raise ModelError(
            f"{kind}: with a shared prompt its hidden rows are off by {error:.1e} relative to its own forward pass. "
            "Some layer depends on more than token, position and attention over the sequence; fastrl cannot train it"
        )
    with keep_double(model):
        _check_head(model, ids, positions, recorder, packed, kind)


def _packed_rows(model: PreTrainedModel, ids: Tensor, positions: Tensor, layout: _Recorder, kind: str) -> Tensor:
    try:
        output = trunk(model)(input_ids=ids[None], position_ids=positions[None], use_cache=False, fastrl_layout=layout)
    except (TypeError, ModelError) as error:
        raise ModelError(f"{kind}: {error}") from error
    return output.last_hidden_state[0]


def _check_calls(model: PreTrainedModel, recorder: _Recorder, kind: str) -> None:
    """Every layer must have called the layout, and said of its window and cap what the configuration says."""
    config = model.config.get_text_config()
    called, expected = len(recorder.calls), config.num_hidden_layers
    if called != expected:
        raise ModelError(
            f"{kind}: {called} of {expected} layers attend through transformers' attention interface; the others are "
            "recurrent, convolutional or hand-written and would mix the responses of a packed stream"
        )
    if getattr(config, "attn_logit_softcapping", None) and any(c.softcap is None for c in recorder.calls.values()):
        raise ModelError(f"{kind}: attn_logit_softcapping is set, but does not reach the attention function")
    types = _layer_types(config)
    windows = [c.sliding_window for c in recorder.calls.values()]
    if any(t == "sliding_attention" and w is None for t, w in zip(types, windows)):
        raise ModelError(f"{kind}: its sliding window does not reach the attention function")
    window = getattr(config, "sliding_window", None)
    if not types and window and getattr(config, "use_sliding_window", True) and None in windows:
        raise ModelError(f"{kind}: sliding_window = {window} does not reach the attention function")


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model with its eager attention and without training-mode behaviour."""
    training = model.training
    model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
        model.train(training)


def _check_head(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, layout: _Recorder, rows: Tensor, kind: str
) -> None:
    """The head must read the trunk's rows as they are, and its logits must follow the formula of `head_of`.

    The second is checked on rows made large enough for a cap to show.
    """
    head = head_of(model)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(rows.device, rows.dtype)
    spread = nn.functional.linear(hidden, head.weight, head.bias).abs().max() * head.logit_scale
    hidden = hidden * (2 * (head.logit_softcap or 20.0) / spread.abs().clamp(min=1e-6))
    inputs: list[Tensor] = []

    def replace(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs.append(arguments[0])
        return (hidden.view_as(arguments[0]),)

    handle = model.get_output_embeddings().register_forward_pre_hook(replace)
    try:
        own = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, fastrl_layout=layout).logits[0]
    finally:
        handle.remove()
    ours = logits_of(hidden, head)
    if len(inputs) != 1 or inputs[0].numel() != rows.numel() or _difference(inputs[0].view_as(rows), rows) > 1e-4:
        raise ModelError(
            f"{kind}: something lies between its trunk and its head; the fused head would be silently wrong"
        )
    if own.shape != ours.shape or _difference(own, ours) > 1e-4:
        raise ModelError(
            f"{kind}: its logits are not softcap(scale * (hidden W^T + b)) with the scale and cap of its "
            "configuration; the fused head would be silently wrong"
        )


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest norm(a - b) / norm(b) over rows; infinity where it is not a number."""
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).nan_to_num(torch.inf).max())
