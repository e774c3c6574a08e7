"""A random Llama of 30k parameters with a character tokenizer, as a folder, for tests that run the trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*= ?.,abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def write_tiny_folder(folder: str | Path, *, name: str = "llama", seed: int = 0) -> str:
    """Model, tokenizer (pad 0, bos 1, eos 2) and generation config; returns the folder as text."""
    model = tiny_model(name, dtype=torch.float32, seed=seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def write_tokenizer(folder: str | Path) -> None:
    """A tokenizer of one id per character (pad 0, bos 1, eos 2, unk 3)."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS])}
    vocabulary = {token: i for token, i in vocabulary.items() if i < VOCABULARY}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def short_run(model: str, folder: str | Path, *more: str) -> list[str]:
    """Overrides of a run of seconds on a tiny folder: 4 prompts x 4 samples x 8 tokens, 4 steps."""
    return [
        f"model.path={model}",
        "data.train=task:arithmetic",
        "data.train_options={size: 32}",
        "reward.functions=[python:tiny_rewards:parity]",
        "rollout.num_prompts_per_step=4",
        "rollout.num_samples_per_prompt=4",
        "rollout.max_response_tokens=8",
        "algorithm.advantage=grpo",
        "optim.total_steps=4",
        "optim.lr=1e-3",
        "run.max_tokens_per_microbatch=256",
        f"run.dir={folder}",
        "run.name=run",
        "logging.console=quiet",
        *more,
    ]
