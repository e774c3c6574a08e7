"""Forward and backward of a trunk over one group of 8 responses: padded, packed, and with the prompt computed once."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.harness.measure import Case, once_in_smoke
from bench.harness.variants import Local
from bench.kernels.cost_model import Cost
from bench.models.packed_forward import batch_of, packed_rows, padded_rows
from fastrl.data.packing import pack
from fastrl.models.load import load_model

SAMPLES, RESPONSE = 8, 32
PROMPTS = (16, 32, 64, 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, smoke):
    """A small Llama with random weights."""
    torch.manual_seed(0)
    heads, layers = (4, 2) if smoke else (5, 6)
    size = 16 * heads if smoke else 64 * heads
    config = LlamaConfig(
        hidden_size=size, intermediate_size=3 * size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=1024, max_position_embeddings=512,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def forward_backward(model, rows_of, grad):
    """A call that gives the hidden rows and two gradients: of the first and of the last layer."""
    first, last = model.model.layers[0].self_attn.q_proj.weight, model.model.layers[-1].mlp.down_proj.weight

    def run():
        model.zero_grad()
        rows = rows_of()
        rows.backward(grad.to(rows.dtype))
        return rows, first.grad, last.grad

    return run


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_sharing(bench, folder, smoke, prompt):
    once_in_smoke(smoke, prompt == PROMPTS[0])
    rng = random.Random(0)
    tokens = lambda count: [rng.randrange(1024) for _ in range(count)]  # noqa: E731
    batch = batch_of([tokens(prompt)], [[tokens(rng.randint(RESPONSE // 2, RESPONSE)) for _ in range(SAMPLES)]])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    model = load_model(folder)
    shared, repeated = (pack(batch, max_tokens=10**9, share_prompts=share)[0] for share in (True, False))
    longest = int((batch.lengths + batch.prompt_lengths[batch.group_index]).max())
    grad = torch.randn(batch.num_tokens, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    weights = sum(p.numel() for n, p in model.named_parameters() if "layers" in n)
    bench(
        Case(
            f"prompt sharing P {prompt} R {RESPONSE} n {SAMPLES}",
            {
                "fastrl": Local(forward_backward(model, lambda: packed_rows(model, shared), grad)),
                "fastrl, prompts repeated": Local(forward_backward(model, lambda: packed_rows(model, repeated), grad)),
                "padded": Local(forward_backward(plain, lambda: padded_rows(plain, batch), grad)),
            },
            expected=lambda: list(forward_backward(exact, lambda: padded_rows(exact, batch), grad)()),
            cost=Cost(4 * 3 * weights, 6 * weights * shared.num_rows),
            notes={
                "fastrl": {"rows": shared.num_rows},
                "fastrl, prompts repeated": {"rows": repeated.num_rows},
                "padded": {"rows": longest * SAMPLES},
            },
        )
    )
