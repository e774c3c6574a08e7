"""A checkpoint as a Hugging Face folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import find_checkpoint, load_checkpoint
from fastrl.errors import CheckpointError
from fastrl.models.load import load_model, load_tokenizer
from fastrl.trainer.precision import master_dtype


def export_run(run: str | Path, folder: str | Path, *, dtype: str | None = None) -> Path:
    """Write the policy of a run (or of one checkpoint) to `folder`: config, safetensors, tokenizer, generation config.

    Args:
        run: a run folder (its newest checkpoint) or a checkpoint folder inside one.
        folder: where to write; made if absent.
        dtype: float32, bfloat16 or float16; None keeps the masters' type.

    Raises:
        CheckpointError: no checkpoint there, a damaged one, or a folder without the run's config.yaml.
    """
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
    state = model.state_dict()
    tensors, _ = load_checkpoint(checkpoint, {"policy": {"model": state, "optimizer": {}}})
    model.load_state_dict(tensors["policy"]["model"])
    if dtype is not None:
        model = model.to(dtype=getattr(torch, dtype))  # type: ignore[call-arg]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
