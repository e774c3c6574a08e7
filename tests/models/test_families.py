"""Model families whose tiny random configurations pass the checks at load; docs/models.md lists them."""

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fastrl.models.load import prepare_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOW = {"sliding_window": 4}
FAMILIES = {
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": WINDOW,
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "ernie4_5": {},
    "exaone4": WINDOW,
    "gemma": {},
    "gemma2": {**WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": WINDOW,
    "glm": {},
    "glm4": {},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    "granite": {"logits_scaling": 5.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES, **{k: v for k, v in FAMILIES[family].items() if k not in SIZES})
    for name, value in FAMILIES[family].items():
        if name in SIZES:
            setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    prepare_model(model, family)


def test_the_page_lists_them():
    page = Path(__file__).parents[2] / "docs" / "models.md"
    listed = re.search(r"<!-- families -->(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed.group(1))) == set(FAMILIES)
