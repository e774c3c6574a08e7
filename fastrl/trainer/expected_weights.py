"""What an engine expects to be given, from the model's configuration alone: no weights are read."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastrl.dist.weight_plan import TensorSpec
from fastrl.dist.weight_source import ModelSource


def expected_weights(
    path: str, dtype: torch.dtype, *, revision: str | None = None, trust_remote_code: bool = False
) -> list[TensorSpec]:
    """Names, shapes and types of every parameter and persistent buffer of the model at `path`, ties under each name.

    Args:
        path: folder or hub name of the model the engine was started with.
        dtype: type of the engine's float tensors.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the model.
    """
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    source = ModelSource(model, dtype, tied=True)
    return source.specs(source.entries())
