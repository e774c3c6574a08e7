"""The promise of the packed forward: log-probs and every gradient equal those of the plain padded forward."""

import pytest
import torch
from plain_reference import gradient_error, packed_gradients, padded_gradients
from tiny_models import BUILDERS, ragged_batch, tiny_model

from fastrl.data.packing import pack
from fastrl.models.load import prepare_model

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
SHAPES = {
    "one group": ([5], [[4, 4, 4]]),
    "one sequence": ([4], [[6]]),
    "uneven groups": ([7, 1, 4], [[3, 9, 1, 6], [2, 5], [8, 1, 1]]),
    "empty responses": ([4, 6, 3], [[0, 5, 0, 3], [0, 0], [0, 1]]),
    "long": ([9, 30], [[40, 17], [21, 33, 2]]),
}


ALIKE = ([3, 5, 5, 2, 1, 5], [[3, 9, 1, 6], [2, 5], [8, 1, 1, 8, 8, 8], [4, 4], [1, 2, 3, 4, 5], [0, 70, 80, 40]])


def weights_of(batch, dtype):
    return torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3), dtype=dtype)


def assert_equal(model_name, batch, dtype, *, max_tokens, share_prompts=True, checkpointing=False, attention="auto"):
    weights = weights_of(batch, dtype)
    plain = tiny_model(model_name, dtype=dtype)
    plain.set_attn_implementation("eager")
    log_prob, gradients = padded_gradients(plain, batch, weights)
    model = prepare_model(
        tiny_model(model_name, dtype=dtype), attention=attention, gradient_checkpointing=checkpointing
    )
    ours, our_gradients = packed_gradients(model, batch, weights, max_tokens=max_tokens, share_prompts=share_prompts)
    assert float((ours - log_prob).abs().max()) < TOLERANCE[dtype] * 5  # nats, of log-probs around -5
    assert gradient_error(our_gradients, gradients) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("share_prompts", [True, False], ids=["shared", "repeated"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model_name", BUILDERS)
def test_one_micro_batch(model_name, shape, share_prompts, dtype):
    batch = ragged_batch(*SHAPES[shape])
    assert_equal(model_name, batch, dtype, max_tokens=10_000, share_prompts=share_prompts)


@pytest.mark.parametrize("num_distinct", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [10_000, 90, 20])
@pytest.mark.parametrize("model_name", ["llama", "gemma2", "gpt2"])
def test_sequences_that_begin_alike(model_name, max_tokens, num_distinct):
    """Few distinct tokens: prompts of different groups and responses share rows, some sequences are equal."""
    batch = ragged_batch(*ALIKE, num_distinct=num_distinct)
    shared, repeated = (
        sum(m.num_rows for m in pack(batch, max_tokens=max_tokens, share_prompts=s)) for s in (True, False)
    )
    assert shared < repeated
    assert_equal(model_name, batch, torch.float64, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [1, 12, 30])
@pytest.mark.parametrize("model_name", ["llama", "gemma2"])
def test_split_groups_and_budgets(model_name, max_tokens):
    """Groups are split, their prompts repeated; the gradients of the pieces add up to the same."""
    assert_equal(model_name, ragged_batch(*SHAPES["uneven groups"]), torch.float64, max_tokens=max_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("model_name", BUILDERS)
def test_gradient_checkpointing(model_name, dtype):
    assert_equal(model_name, ragged_batch(*SHAPES["uneven groups"]), dtype, max_tokens=30, checkpointing=True)


@pytest.mark.parametrize("attention", ["sdpa", "tiled"])
@pytest.mark.parametrize("model_name", ["llama", "mistral", "gpt2"])
def test_every_cpu_attention(model_name, attention):
    batch = ragged_batch(*ALIKE, num_distinct=3)
    assert_equal(model_name, batch, torch.float64, max_tokens=10_000, attention=attention)


def test_train_mode_changes_nothing():
    """Dropout is off in every module, so train() and eval() compute the same (GPT-2 has 0.1 everywhere by default)."""
    batch = ragged_batch(*SHAPES["uneven groups"])
    weights = weights_of(batch, torch.float64)
    model = prepare_model(tiny_model("gpt2"))
    before, _ = packed_gradients(model, batch, weights, max_tokens=10_000)
    model.train()
    after, _ = packed_gradients(model, batch, weights, max_tokens=10_000)
    assert torch.equal(before, after)
