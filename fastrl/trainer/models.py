"""The models of a run: whole on one rank, read into shards on several, with adapters where the configuration asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from fastrl.config.schema import Config
from fastrl.dist.fsdp import load_sharded, shard_model, splits
from fastrl.models.load import load_model
from fastrl.models.lora import add_lora

Model = TypeVar("Model", bound=nn.Module)


def load_policy(
    config: Config, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None = None
) -> PreTrainedModel:
    """The policy (or a second, frozen copy of it)."""
    return load_part(load_model, config.model.path, config, dtype, device, mesh)


def load_trained_policy(
    config: Config, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
) -> PreTrainedModel:
    """The policy as it is trained: whole, or with adapters beside frozen weights."""
    m = config.model
    if not m.lora_rank:
        return load_policy(config, dtype, device, mesh)
    model = load_part(load_model, m.path, config, dtype, torch.device("cpu") if splits(mesh) else device, None)
    add_lora(model, m.lora_rank, alpha=m.lora_alpha or 2.0 * m.lora_rank, targets=m.lora_targets, seed=config.run.seed)
    return shard_model(model, mesh, dtype=dtype, offload_parameters=config.parallel.offload == "parameters")


def load_part(
    load: Callable[..., Model],
    path: str,
    config: Config,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> Model:
    """One model, whole or sharded over the ranks as the section `parallel` says."""
    m = config.model
    options: dict[str, Any] = {
        "attention": m.attention,
        "liger": m.liger,
        "revision": m.revision if path == m.path else None,
        "trust_remote_code": m.trust_remote_code,
        "gradient_checkpointing": m.gradient_checkpointing,
        "gradient_checkpointing_every": m.gradient_checkpointing_every,
        "compiled": m.compile,
        "gradient_checkpointing_keep": m.gradient_checkpointing_keep,
    }
    if not splits(mesh):
        return load(path, dtype=dtype, device=device, **options)
    assert mesh is not None
    offload = config.parallel.offload == "parameters"
    return load_sharded(load, path, mesh, device, dtype=dtype, offload_parameters=offload, **options)
