"""Low-rank adapters (https://arxiv.org/abs/2106.09685): W + (alpha / rank) B A, of which only A and B are trained.

peft makes and merges them; the model keeps its class. The reference policy is the model with its adapters off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastrl.errors import ConfigError, ModelError
from fastrl.models.head import trunk

_ADAPTER = "default"


def add_lora(
    model: PreTrainedModel, rank: int, *, alpha: float, targets: Sequence[str] | None = None, seed: int = 0
) -> PreTrainedModel:
    """Put adapters beside linear layers and freeze everything else; returns the same object.

    Args:
        model: a loaded causal LM.
        rank: of A and B.
        alpha: the adapter's output is scaled by alpha / rank.
        targets: last parts of the names of the linear layers that get one; None takes all of the decoder layers.
        seed: of A's start; B starts at zero, so the model computes what it did before.

    Raises:
        ConfigError: peft is not installed.
        ModelError: no layer has one of these names.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("model.lora_rank needs peft: pip install 'fastrl[lora]'") from error
    names = linear_names(model)
    chosen = sorted(set(targets) & names) if targets else sorted(names)
    if not chosen or (targets and set(targets) - names):
        wrong = sorted(set(targets or ()) - names)
        raise ModelError(f"model.lora_targets: no linear layer is called {', '.join(wrong)}; there are {sorted(names)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
        config = LoraConfig(target_modules=chosen, **options)
        training = model.training
        model.add_adapter(config, adapter_name=_ADAPTER)
        model.train(training)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(model.dtype)
    return model


def linear_names(model: nn.Module) -> set[str]:
    """Last parts of the names of the linear layers inside the trunk."""
    return {name.rpartition(".")[2] for name, m in trunk(model).named_modules() if isinstance(m, nn.Linear)}


def has_lora(model: nn.Module) -> bool:
    """Whether `add_lora` was here."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is one of A or B."""
    return ".lora_A." in name or ".lora_B." in name


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model without its adapters inside: the policy that training started from."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, or the adapters alone where there are some: what a checkpoint keeps of a model."""
    state = model.state_dict()
    return {name: t for name, t in state.items() if is_adapter(name)} if has_lora(model) else state


def load_trained_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put back what `trained_state` gave."""
    model.load_state_dict(state, strict=not has_lora(model))


@torch.no_grad()
def save_adapter(model: Any, folder: str | Path, base: str, dtype: torch.dtype | None = None) -> None:
    """Write the adapters alone, as a folder that peft loads on top of the model at `base`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": t.detach().to(dtype or t.dtype).contiguous()
        for name, t in trained_state(model).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config[_ADAPTER].to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    text = json.dumps(plain, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
