"""The memory model: parameter counts of known models, and one small layout by hand."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from fastrl.trainer.memory_plan import (
    BUCKET_BYTES,
    GIB,
    RESERVE_BYTES,
    SHAPES,
    ModelShape,
    Setup,
    activation_bytes,
    fits,
    generation_bytes,
    kv_bytes,
    kv_tokens,
    smallest_engine,
    update_bytes,
)

# 2 layers, H 8, 2 query heads and 1 key head of 4, I 16, V 10
SMALL = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocabulary=10)
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8  # 592
ROOT = 10 * 8 + 8  # 88
TOTAL = 2 * LAYER + ROOT  # 1272


def test_parameters_by_hand():
    assert (SMALL.layer_parameters, SMALL.root_parameters, SMALL.parameters) == (592, 88, 1272) == (LAYER, ROOT, TOTAL)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_a_model(tied):
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    shape = ModelShape(3, 32, 4, 2, 8, 48, 61, tied=tied)
    assert shape.parameters == sum(p.numel() for p in LlamaForCausalLM(config).parameters())


def test_published_sizes():
    """SmolLM2-135M has 134,515,008 parameters, Qwen2.5 0.494, 1.54, 3.09, 7.61, 14.7, 32.5 billion, Llama 3 70.6."""
    assert ModelShape(30, 576, 9, 3, 64, 1536, 49152).parameters == 134_515_008
    billions = {name: shape.parameters / 1e9 for name, shape in SHAPES.items()}
    published = {"0.5B": 0.494, "1.5B": 1.54, "3B": 3.09, "7B": 7.61, "14B": 14.7, "32B": 32.5, "70B": 70.6}
    assert billions == pytest.approx(published, rel=0.01)


def test_activations_by_hand():
    layer = 2 * 8 + 2 * 8 + 2 * (8 + 2 * 4) + 2 * 8 + 2 * 8 + 2 * 8 + 3 * 2 * 16  # in the order of the docstring
    assert activation_bytes(SMALL, "none") == 2 * layer
    assert activation_bytes(SMALL, "full") == 2 * (2 * 8) + layer
    assert activation_bytes(SMALL, "none", fused=False) == 2 * (layer + 16 * 8 + 2 * 16)
    assert kv_bytes(SMALL) == 2 * 2 * (2 * 4)  # 2 layers, key and value, 4 numbers of 2 bytes


def test_update_on_one_and_on_four_ranks_by_hand():
    one = update_bytes(SMALL, Setup(rows=100))
    assert one == {
        "state": 12 * TOTAL,
        "gradients": 4 * TOTAL,
        "gathered weights": 2 * TOTAL,
        "gradients in flight": 0,
        "activations": 100 * activation_bytes(SMALL),
        "head": 2 * 100 * 10 + 4 * 100 * 8,
    }
    four = update_bytes(SMALL, Setup(shard=4, rows=100, sequence=2, critic=True))
    assert four == {
        "state": 2 * 12 * TOTAL / 4,
        "gradients": TOTAL,
        "gathered weights": 2 * (2 * LAYER + ROOT),
        "gradients in flight": 6 * (LAYER + ROOT),
        "activations": 50 * activation_bytes(SMALL),
        "head": 2 * 50 * 10 + 4 * 50 * 8,
    }
    assert update_bytes(SMALL, Setup(offload=True))["state"] == 0


def test_room_for_keys_and_values_by_hand():
    setup = Setup(shard=2, engine_ranks=2)
    used = sum(generation_bytes(SMALL, setup).values())
    assert used == 12 * TOTAL / 2 + 2 * TOTAL / 2 + 2 * BUCKET_BYTES
    assert kv_tokens(SMALL, setup, 8.0) == (8 * GIB - used - RESERVE_BYTES) * 2 // kv_bytes(SMALL)
    assert kv_tokens(SMALL, setup, 6.0) == 0


def test_what_fits_on_an_h200():
    """7B needs 16 bytes x 7.6e9 = 113 GiB of state and gradients and 14 GiB of bfloat16 weights: not on one of 139."""
    assert fits(SHAPES["3B"], Setup(), 139.0)
    assert not fits(SHAPES["7B"], Setup(), 139.0)
    assert fits(SHAPES["7B"], Setup(shard=2), 139.0)
    assert smallest_engine(SHAPES["70B"], Setup(shard=8), 139.0, 8) is None
    found = smallest_engine(SHAPES["70B"], Setup(shard=16), 139.0, 8)
    assert found is not None and found.engine_ranks > 1
