"""Weights from safetensors straight into shards: no rank ever holds a whole model.

The skeleton has its parameters on the meta device and its buffers for real (a rotary table made on meta would come out
uninitialised, silently). It is sharded, given memory, and each rank reads the rows it owns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fastrl.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, their buffers where they would be."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta:  # tying sets the same parameter once more
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def local_folder(source: str, revision: str | None = None) -> Path:
    """The folder that holds the safetensors of `source`, a folder or a hub name (downloaded where it is not cached)."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.safetensors.index.json"]
    return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))


def weight_files(folder: str | Path) -> dict[str, Path] | None:
    """The file of each tensor by its name, or None where the folder holds no safetensors."""
    folder = Path(folder)
    if (folder / INDEX).is_file():
        table = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in table.items()}
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    return None


def missing_weights(model: nn.Module, names: Callable[[str], str], stored: dict[str, Path]) -> list[str]:
    """Parameters of `model` (a tied one counts once) that no file has under its stored name."""
    return [name for name, _ in model.named_parameters() if names(name) not in stored]


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Uninitialised memory for parameters on meta; buffers keep their values, tied parameters stay tied."""
    kept = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    names: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[name] = names.setdefault(id(parameter), name)
    model.to_empty(device=device)
    for name, first in tied.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = model.get_parameter(first)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])


@torch.no_grad()
def read_weights(model: nn.Module, names: Callable[[str], str], stored: dict[str, Path]) -> None:
    """Fill every parameter of `model`, whole or sharded, from the stored tensor of the same shape.

    Raises:
        ModelError: a stored tensor has another shape; names it.
    """
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        by_file.setdefault(stored[names(name)], []).append((names(name), parameter))
    for path, parameters in by_file.items():
        with safe_open(path, "pt") as file:
            for name, target in parameters:
                source = file.get_slice(name)
                if tuple(source.get_shape()) != tuple(target.shape):
                    raise ModelError(
                        f"{path}: {name} is {list(source.get_shape())}, the model's is {list(target.shape)}"
                    )
                fill(target, source)


@torch.no_grad()
def fill(parameter: Tensor, source: Any) -> None:
    """Copy the part of `source`, a tensor or a slice of a file, that this rank owns."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(source[tuple(slice(0, size) for size in parameter.shape)])
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local()
    if local.numel():
        local.copy_(source[tuple(slice(start, start + size) for start, size in zip(offset, shape))])
