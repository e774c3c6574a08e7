"""Models and tokenizers from a folder, the hub or the package, ready to train: own attention, no dropout, float32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastrl.errors import ModelError
from fastrl.models.attention import IMPLEMENTATION

BUILTIN_TINY = "builtin:tiny"


def resolve_path(path: str) -> str:
    """`builtin:tiny` -> the packaged folder; other values of model.path as they are."""
    if path == BUILTIN_TINY:
        return str(Path(__file__).resolve().parent.parent / "assets" / "tiny")
    if path.startswith("builtin:"):
        raise ModelError(f"model.path = {path}: the only model shipped with fastrl is {BUILTIN_TINY}")
    return path


def load_model(
    path: str,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """A causal LM whose attention takes `fastrl_layout=` and whose every dropout is off.

    Args:
        path: folder, hub name or `builtin:tiny` (model.path).
        dtype: compute type. Parameters are float32, or float64 when this is float64; bfloat16 is the trainer's autocast.
        device: where the parameters go.
        attention: auto, sdpa, flash or varlen.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the model.
        gradient_checkpointing: recompute each layer in the backward pass.

    Raises:
        ModelError: the folder is missing or incomplete, or the architecture cannot be trained exactly.
    """
    source = _check_source(path)
    parameter_dtype = torch.float64 if dtype in (torch.float64, "float64") else torch.float32
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **hub)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=parameter_dtype, attn_implementation=IMPLEMENTATION, **hub
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_explain(path, error)) from error
    model.to(device)
    disable_dropout(model)
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; `chat_template` (a file with a Jinja template) replaces its own."""
    source = _check_source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_explain(path, error)) from error
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> set[int]:
    """Every id that ends a sequence: those of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for holder in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return {int(i) for i in found}


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate of a model to 0, so that train() and eval() compute the same."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(part in name for part in ("dropout", "pdrop", "layerdrop", "jitter")):
                setattr(module, name, 0.0)


def _check_source(path: str) -> str:
    source = resolve_path(path)
    folder = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if folder.is_dir():
        return str(folder)
    if looks_local or path == BUILTIN_TINY:
        raise ModelError(f"model.path = {path}: no such folder")
    return source


def _explain(path: str, error: Exception) -> str:
    text = str(error).strip().splitlines()
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "")
    hint = " (HF_HUB_OFFLINE is set; unset it to download)" if offline else ""
    return f"model.path = {path}: {text[0] if text else type(error).__name__}{hint}"
