"""Models and tokenizers from a folder, the hub or the package, ready to train: own attention, no dropout, float32."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from fastrl.errors import ModelError
from fastrl.models.attention import IMPLEMENTATION
from fastrl.models.cpu import use_onednn
from fastrl.models.head import trunk
from fastrl.models.hub import local_files_only
from fastrl.models.layers import compile_layers
from fastrl.models.liger import apply_liger, choose_liger
from fastrl.models.recompute import recompute_layers
from fastrl.models.stream import fill, local_folder, parameters_on_meta, weight_files
from fastrl.models.training_layout import choose_attention
from fastrl.models.verify import refuse_by_name, verify

BUILTIN_TINY = "builtin:tiny"
VALUE_HEAD_FILE = "value_head.safetensors"
STORED_SCORE = "score.weight"  # the head of transformers' sequence classifiers
NO_CONFIG = "config.json: it is no Hugging Face model folder"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


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
    liger: str = "off",
    revision: str | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    gradient_checkpointing_every: int = 1,
    gradient_checkpointing_keep: str = "nothing",
    compiled: bool = False,
    skeleton: bool = False,
) -> PreTrainedModel:
    """A causal LM whose attention takes `fastrl_layout=` and whose every dropout is off, checked to be exact.

    Args:
        path: folder, hub name or `builtin:tiny` (model.path).
        dtype: compute type. Parameters are float64 when this is, else float32: bfloat16 is the trainer's autocast.
        device: where the parameters go.
        attention: auto, flash, varlen, sdpa or tiled (model.attention).
        liger: auto, on or off (model.liger).
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the model.
        gradient_checkpointing: recompute layers in the backward pass.
        gradient_checkpointing_every, gradient_checkpointing_keep: which, and what of them stays (`recompute_layers`).
        compiled: compile each decoder layer.
        skeleton: leave the parameters on the meta device, without values; they are read once the model is sharded.
            A model of few layers stands in for the check.

    Raises:
        ModelError: the folder is missing or incomplete, or the architecture cannot be trained exactly.
    """
    source = _check_source(path, ("config.json",), NO_CONFIG)
    parameter_dtype = torch.float64 if _as_dtype(dtype) == torch.float64 else torch.float32
    choose_attention(torch.device(device), _as_dtype(dtype), attention)
    hub = _hub_options(source, revision, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(source, **hub)
        refuse_by_name(config, path)
        if skeleton:
            model = skeleton_of(config, parameter_dtype, trust_remote_code)
            with contextlib.suppress(OSError):  # a folder need not have one
                model.generation_config = GenerationConfig.from_pretrained(source, revision=revision or "main")
        else:
            model = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=parameter_dtype, attn_implementation=IMPLEMENTATION, **hub
            )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ModelError(_explain(path, error)) from error
    if skeleton:
        verify_stand_in(config, path, parameter_dtype, trust_remote_code)
    else:
        nn.Module.to(model, device)
    if choose_liger(config.model_type, torch.device(device), _as_dtype(dtype), liger):
        setattr(model, "fastrl_liger", apply_liger(model))  # noqa: B010
    prepare_model(
        model,
        path,
        attention=attention,
        gradient_checkpointing=gradient_checkpointing,
        gradient_checkpointing_every=gradient_checkpointing_every,
        gradient_checkpointing_keep=gradient_checkpointing_keep,
        check=not skeleton,
    )
    if compiled:
        compile_layers(model)
    return model


def skeleton_of(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a configuration with its parameters on the meta device and its buffers on the CPU."""
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION, trust_remote_code=trust_remote_code
        )


def verify_stand_in(config: PreTrainedConfig, path: str, dtype: torch.dtype, trust_remote_code: bool = False) -> None:
    """Check the architecture on a random model of as few layers as show every kind of layer; once per machine."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    small = copy.deepcopy(config)
    text = small.get_text_config()
    types = list(getattr(text, "layer_types", None) or ())
    text.num_hidden_layers = max([2, *(1 + types.index(kind) for kind in set(types))])
    if types:
        text.layer_types = types[: text.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            small, dtype=dtype, attn_implementation=IMPLEMENTATION, trust_remote_code=trust_remote_code
        )
    prepare_model(model, path)


def prepare_model(
    model: PreTrainedModel,
    path: str = "(in memory)",
    *,
    attention: str = "auto",
    gradient_checkpointing: bool = False,
    gradient_checkpointing_every: int = 1,
    gradient_checkpointing_keep: str = "nothing",
    check: bool = True,
) -> PreTrainedModel:
    """Make a causal LM in memory ready: own attention, no dropout, verified; returns the same object."""
    refuse_by_name(model.config, path)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.dtype == torch.float64:  # grouped products of experts know no float64; a model without experts refuses
        with contextlib.suppress(ValueError):
            model.set_experts_implementation("eager")
    setattr(model, "fastrl_attention", attention)  # noqa: B010
    disable_dropout(model)
    if model.device.type == "cpu":
        use_onednn(trunk(model))
    model.eval()
    if gradient_checkpointing:
        recompute_layers(model, every=gradient_checkpointing_every, keep=gradient_checkpointing_keep)
    if check:
        verify(model, path)
    return model


class ValueModel(nn.Module):
    """A causal LM's trunk with one number per row: V = value_head(hidden). `value_head` is linear, without bias."""

    base_model_prefix = "trunk"

    def __init__(self, trunk_module: nn.Module, attention: str, causal_prefix: str = "model") -> None:
        super().__init__()
        self.trunk = trunk_module
        self.stored_head: str | None = None  # tensor of the model's own files that the head is read from
        self.causal_prefix = causal_prefix  # what precedes the names of the trunk's parameters in the causal LM
        config: Any = trunk_module.config
        self.config = config
        self.fastrl_attention = attention
        embedding = next(trunk_module.parameters())
        hidden_size = config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=embedding.dtype, device=embedding.device)
        nn.init.zeros_(self.value_head.weight)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the trunk as a Hugging Face folder and the value head beside it; `load_critic` reads both."""
        trunk_module: Any = self.trunk
        trunk_module.save_pretrained(folder)
        save_file({"weight": self.value_head.weight.detach().contiguous()}, Path(folder) / VALUE_HEAD_FILE)


def load_critic(path: str, **options: Any) -> ValueModel:
    """The trunk of the model at `path` with a value head: the one saved beside it, else zeros (all values 0).

    Args:
        path: folder, hub name or `builtin:tiny` (critic.path).
        options: those of `load_model`.

    Raises:
        ModelError: as `load_model`.
    """
    with _about("critic.path = "):
        causal = load_model(path, **options)
    critic = ValueModel(trunk(causal), options.get("attention", "auto"), str(causal.base_model_prefix))
    critic.train(causal.training)
    if not options.get("skeleton"):
        set_value_head(critic, path)
    return critic


def load_reward_model(path: str, **options: Any) -> ValueModel:
    """A frozen sequence classification model with one label, as a value model: the score is its head of a row.

    Args:
        path: folder or hub name (`model:PATH` in reward.functions).
        options: those of `load_model`.

    Raises:
        ModelError: as `load_model`, or the files hold no `score.weight` of one label.
    """
    with _about("reward.functions: model:"):
        labels = _stored_labels(path, options.get("revision"))
        if labels != 1:
            raise ModelError(
                f"reward model {path}: {STORED_SCORE} has {labels} labels; a score is one number, num_labels=1"
            )
        before = transformers_logging.get_verbosity()
        # a classifier has no language head: nothing reads the one made for it
        transformers_logging.set_verbosity_error()
        try:
            causal = load_model(path, **options)
        finally:
            transformers_logging.set_verbosity(before)
        model = ValueModel(trunk(causal), options.get("attention", "auto"), str(causal.base_model_prefix))
        model.stored_head = STORED_SCORE
        model.eval().requires_grad_(False)
        if not options.get("skeleton"):
            set_value_head(model, path, options.get("revision"))
        return model


@contextlib.contextmanager
def _about(key: str) -> Iterator[None]:
    """What is said about `model.path` is about another key."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("model.path = ", key, 1)) from error


def _stored_labels(path: str, revision: str | None) -> int:
    """Rows of the score head in a reward model's files."""
    try:
        stored = weight_files(local_folder(_check_source(path, ("config.json",), NO_CONFIG), revision))
        if stored is not None and STORED_SCORE in stored:
            with safe_open(stored[STORED_SCORE], "pt") as file:
                return int(file.get_slice(STORED_SCORE).get_shape()[0])
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # of the hub too
        raise ModelError(_explain(path, error)) from error
    raise ModelError(
        f"reward model {path}: no safetensors file holds {STORED_SCORE}; it must be a sequence classification "
        "model of a decoder (LlamaForSequenceClassification and the like), saved as safetensors"
    )


def set_value_head(critic: ValueModel, path: str, revision: str | None = None) -> None:
    """The head in the model's own files, the value head saved beside the model, else zeros; whole or sharded."""
    if critic.stored_head is not None:
        stored = weight_files(local_folder(resolve_path(path), revision)) or {}
        with safe_open(stored[critic.stored_head], "pt") as file:
            fill(critic.value_head.weight, file.get_slice(critic.stored_head))
        return
    saved, weight = Path(resolve_path(path)).expanduser() / VALUE_HEAD_FILE, critic.value_head.weight
    fill(weight, load_file(saved)["weight"] if saved.is_file() else torch.zeros(weight.shape))


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; `chat_template` (a file with a Jinja template) replaces its own."""
    source = _check_source(path, TOKENIZER_FILES, "tokenizer: set model.tokenizer_path to one that does")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **_hub_options(source, revision, trust_remote_code))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_explain(path, error)) from error
    if chat_template is not None:
        if not Path(chat_template).is_file():
            raise ModelError(f"model.chat_template = {chat_template}: no such file")
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


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _check_source(path: str, needs: tuple[str, ...], hint: str) -> str:
    """The folder or hub name behind `path`; a folder must exist and hold one of the files `needs`."""
    source = resolve_path(path)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in needs):
            raise ModelError(f"model.path = {path}: the folder holds no {hint}")
        return str(folder)
    if path == BUILTIN_TINY or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(f"model.path = {path}: no such folder")
    return source


def _hub_options(source: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """What `from_pretrained` is told about the hub."""
    cached = local_files_only(Path(source).is_dir())
    return {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": cached}


def _explain(path: str, error: Exception) -> str:
    """One line for what transformers says in many."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "couldn't connect" in text or "offline mode" in text:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        why = "HF_HUB_OFFLINE is set: unset it to download" if offline else "the hub cannot be reached"
        return f"model.path = {path}: not in the local cache, and {why}; or give a folder"
    return f"model.path = {path}: {text}"
