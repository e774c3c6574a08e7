"""The packaged model: a normal Hugging Face folder; its tokenizer writes characters and starts prompts with one BOS."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastrl
from fastrl.data.prompts import load_prompts

FOLDER = Path(fastrl.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_characters_round_trip(tokenizer):
    text = "".join(chr(code) for code in range(32, 127)) + "\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_prompts_start_with_one_bos_and_stay_open(tokenizer):
    prompts = load_prompts("task:arithmetic", tokenizer, options={"size": 8})
    for prompt in prompts:
        assert prompt.token_ids.count(tokenizer.bos_token_id) == 1 and prompt.token_ids[0] == tokenizer.bos_token_id
        assert tokenizer.eos_token_id not in prompt.token_ids
        assert tokenizer.decode(prompt.token_ids[1:]) == prompt.text


def test_the_folder_is_small_and_complete(tokenizer):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 6e6
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.5e6
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
