"""Liger's Triton kernels for norms, rotations and gated products in place of a model's own, where they can run.

    model.liger = auto    on a GPU with run.dtype = bfloat16, liger-kernel installed, and a model type of TYPES
    model.liger = on      the same, and an error that says what is missing otherwise
    model.liger = off     the model's own modules

Loss and head are left alone: fastrl has its own. A patched model passes the same check with numbers as any other when
it is loaded. Liger replaces the rotation in the model's module, that is for every model of this type in the process.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from fastrl.errors import ModelError

WANTED = ("auto", "on", "off")
# Dense decoders whose whole layer Liger covers: norms, rotation, gated product.
TYPES = ("gemma", "gemma2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
ON = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True}
OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def why_not_liger(model_type: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """None when Liger's kernels can serve such a model; else what is against it."""
    if device.type != "cuda":
        return f"needs a GPU, this is {device.type}"
    if dtype != torch.bfloat16:
        return f"needs run.dtype = bfloat16, this is {str(dtype).removeprefix('torch.')}"
    if model_type not in TYPES:
        return f"does not cover model type {model_type} (it does {', '.join(TYPES)})"
    if importlib.util.find_spec("liger_kernel") is None:
        return "is not installed: pip install 'fastrl[liger]'"
    return None


def choose_liger(model_type: str, device: torch.device, dtype: torch.dtype, wanted: str = "auto") -> bool:
    """Whether to patch; `wanted` is model.liger.

    Raises:
        ModelError: it is wanted and cannot run here, with the reason.
    """
    if wanted not in WANTED:
        raise ModelError(f"model.liger = {wanted}: choose {', '.join(WANTED)}")
    if wanted == "off":
        return False
    why = why_not_liger(model_type, device, dtype)
    if why is not None and wanted == "on":
        raise ModelError(f"model.liger = on: Liger {why}; or set model.liger=auto")
    return why is None


def apply_liger(model: PreTrainedModel) -> list[str]:
    """Patch a loaded model in place; returns what was replaced.

    Raises:
        ModelError: the installed Liger has no patch for this model type.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model_type = model.config.model_type
    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if patch is None:
        raise ModelError(f"model.liger: the installed liger-kernel has no patch for {model_type}; set model.liger=off")
    takes = inspect.signature(patch).parameters
    options: dict[str, Any] = {name: value for name, value in (ON | OFF).items() if name in takes}
    patch(model=model, **options)
    return sorted(name for name in options if name in ON)
