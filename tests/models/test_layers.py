"""Compiled layers compute what the others do, for any number of rows."""

import pytest
import torch
from tiny_models import ragged_batch, tiny_model

from fastrl.data.packing import pack
from fastrl.errors import ModelError
from fastrl.models.forward import hidden_rows, inside_head
from fastrl.models.head import logits_of
from fastrl.models.layers import compile_layers, decoder_layers
from fastrl.models.load import prepare_model


def outcome(model, micro):
    """(logits, flat gradient)."""
    model.zero_grad()
    logits = inside_head(model, logits_of, hidden_rows(model, micro))
    logits.square().mean().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.slow
def test_compiled_layers():
    plain, compiled = (prepare_model(tiny_model("llama", dtype=torch.float32)) for _ in range(2))
    compile_layers(compiled)
    for lengths in ([[3, 5], [2, 4]], [[7, 1], [6, 6]], [[2], [1]]):
        micro = pack(ragged_batch([4, 6], lengths), max_tokens=1000)[0]
        for mine, own in zip(outcome(compiled, micro), outcome(plain, micro)):
            assert (mine - own).norm() <= 1e-5 * own.norm()


def test_the_layers_of_models():
    assert len(decoder_layers(tiny_model("llama"))) == 3
    assert [type(layer).__name__ for layer in decoder_layers(tiny_model("gpt2"))] == ["GPT2Block"] * 3
    model = tiny_model("llama")
    model.model._no_split_modules = []
    with pytest.raises(ModelError, match=r"set parallel\.shard = 1"):
        decoder_layers(model)
