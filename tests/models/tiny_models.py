"""Tiny random models with fixed seeds, and batches to run them on. Used by the tests of several rooms."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fastrl.data.batch import RolloutBatch, cu_seqlens_of

VOCABULARY = 61

_ROPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

BUILDERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_ROPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_ROPE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_ROPE, tie_word_embeddings=True)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**_ROPE)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **_ROPE,
            query_pre_attn_scalar=8,
            sliding_window=6,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_ROPE, sliding_window=5)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
        )
    ),
}


def tiny_model(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model of about 30k parameters, its weights large enough that attention and caps are not near-linear."""
    torch.manual_seed(seed)
    model = BUILDERS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1))
            if parameter.dim() == 1 and "norm" in parameter_name and name not in ("gemma", "gemma2"):
                parameter.add_(1.0)  # Gemma's norms multiply by 1 + weight
    torch.nn.Module.to(model, dtype)
    return model.eval()


def ragged_batch(
    prompt_lengths: list[int], response_lengths: list[list[int]], *, seed: int = 0, num_distinct: int = VOCABULARY - 3
) -> RolloutBatch:
    """A batch of random tokens: one prompt per group, `response_lengths[g]` the lengths of its responses.

    With few distinct tokens many prompts and responses begin alike, some are equal.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, 3 + num_distinct, (count,), generator=generator)

    lengths = torch.tensor([n for group in response_lengths for n in group], dtype=torch.int64)
    group_index = torch.repeat_interleave(
        torch.arange(len(prompt_lengths)), torch.tensor([len(group) for group in response_lengths], dtype=torch.int64)
    )
    count = lengths.numel()
    return RolloutBatch(
        prompt_ids=tokens(sum(prompt_lengths)),
        prompt_cu_seqlens=cu_seqlens_of(torch.tensor(prompt_lengths)),
        response_ids=tokens(int(lengths.sum())),
        cu_seqlens=cu_seqlens_of(lengths),
        group_index=group_index,
        group_id=group_index + 100,
        sample_id=torch.arange(count),
        finish_reason=torch.zeros(count, dtype=torch.int8),
        policy_version=torch.zeros(count, dtype=torch.int64),
        response_mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
    )
