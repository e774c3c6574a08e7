"""Tiny models that vLLM takes on a CPU (head size 32), as folders, and what Hugging Face says about them."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_folder import write_tokenizer
from tiny_models import VOCABULARY
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BUILDERS = {
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=tied)),
    "gpt2": lambda tied: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=128,
            n_layer=2,
            n_head=4,
            n_positions=256,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=tied,
        )
    ),
    "mixtral": lambda tied: MixtralForCausalLM(
        MixtralConfig(**_SIZES | {"intermediate_size": 64}, num_local_experts=4, tie_word_embeddings=tied)
    ),
    "qwen3_moe": lambda tied: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, tie_word_embeddings=tied
        )
    ),
    "qwen2": lambda tied: Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=tied)),
}


def write_vllm_folder(folder: str | Path, kind: str, *, tied: bool, seed: int = 0) -> str:
    """A random model with a character tokenizer (pad 0, bos 1, eos 2); returns the folder as text."""
    torch.manual_seed(seed)
    model = BUILDERS[kind](tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
            if "norm" in name or ".ln_" in name:
                parameter.add_(1.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def plain_model(folder: str) -> PreTrainedModel:
    """The model with Hugging Face's own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def move(model: PreTrainedModel, size: float = 0.05, seed: int = 0) -> None:
    """Change every parameter, as an optimizer step would, but more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


@torch.no_grad()
def reference_log_probs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float
) -> tuple[torch.Tensor, list[int]]:
    """Log-probs of a response under the model's own forward pass, and the most likely token at each place."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    log_prob = (logits / (temperature or 1.0)).log_softmax(-1)
    return log_prob.gather(1, torch.tensor(response)[:, None])[:, 0], logits.argmax(-1).tolist()
