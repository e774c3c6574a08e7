"""Compute type and device of a run: fp32 (or fp64) masters, bf16 compute by autocast."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from fastrl.dist.mesh import local_device
from fastrl.errors import ConfigError


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager:
    """bf16 compute over fp32 parameters; float32 and float64 run as they are."""
    if dtype == torch.bfloat16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def compute_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float64` -> torch dtype."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def master_dtype(name: str) -> torch.dtype:
    """Type of parameters and optimizer state: float32, or float64 where the run computes in it."""
    return torch.float64 if name == "float64" else torch.float32


def resolve_device(name: str) -> torch.device:
    """`auto` -> a GPU where there is one (this rank's own), else the CPU; a device that does not exist is refused."""
    if name == "auto":
        return local_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device = {name}: not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name}, but torch finds no GPU here: use run.device=cpu or run.device=auto")
    return local_device(device)
