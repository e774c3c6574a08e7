"""A checkpoint as a Hugging Face folder that transformers loads."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import find_checkpoint, load_checkpoint
from fastrl.dist.weight_lora import merged_state
from fastrl.errors import CheckpointError, ConfigError
from fastrl.models.load import load_model, load_tokenizer
from fastrl.models.lora import add_lora, load_trained_state, save_adapter, trained_state
from fastrl.trainer.precision import master_dtype


def export_run(run: str | Path, folder: str | Path, *, dtype: str | None = None, adapter_only: bool = False) -> Path:
    """Write the policy of a run (or of one checkpoint) to `folder`: config, safetensors, tokenizer, generation config.

    Args:
        run: a run folder (its newest checkpoint) or a checkpoint folder inside one.
        folder: where to write; made if absent.
        dtype: float32, bfloat16 or float16; None keeps the masters' type.
        adapter_only: write the adapters alone, for peft, instead of the model with them merged in.

    Raises:
        CheckpointError: no checkpoint there, a damaged one, or a folder without the run's config.yaml.
    """
    disable_progress_bar()
    checkpoint = find_checkpoint(run)
    config_file = next(
        (p / "config.yaml" for p in [Path(run), *checkpoint.parents] if (p / "config.yaml").is_file()), None
    )
    if config_file is None:
        raise CheckpointError(f"{checkpoint}: found no config.yaml of the run above it")
    config = load_config([config_file], cross_check=False).config
    m = config.model
    model = load_model(
        m.path, dtype=master_dtype(config.run.dtype), revision=m.revision, trust_remote_code=m.trust_remote_code
    )
    tokenizer = load_tokenizer(
        m.tokenizer_path or m.path,
        revision=m.revision,
        trust_remote_code=m.trust_remote_code,
        chat_template=m.chat_template,
    )
    if adapter_only and not m.lora_rank:
        raise ConfigError(f"{config_file}: model.lora_rank = 0, the run trained no adapters to export by themselves")
    trained = model
    if m.lora_rank:
        trained = add_lora(
            copy.deepcopy(model), m.lora_rank, alpha=m.lora_alpha or 2.0 * m.lora_rank, targets=m.lora_targets
        )
    tensors, _ = load_checkpoint(checkpoint, {"policy": {"model": trained_state(trained), "optimizer": {}}})
    load_trained_state(trained, tensors["policy"]["model"])
    if adapter_only:
        save_adapter(trained, folder, m.path, None if dtype is None else getattr(torch, dtype))
        tokenizer.save_pretrained(folder)
        return Path(folder)
    if m.lora_rank:
        model.load_state_dict(dict(merged_state(trained)))
    if dtype is not None:
        model = model.to(dtype=getattr(torch, dtype))  # type: ignore[call-arg]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
