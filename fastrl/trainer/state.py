"""What a checkpoint of a run holds, and how a run is put back to it bit for bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastrl.dist.checkpoint import CheckpointManager, load_checkpoint
from fastrl.errors import CheckpointError
from fastrl.models.lora import load_trained_state, trained_state
from fastrl.trainer.optim import Optimizer

if TYPE_CHECKING:
    from fastrl.trainer.loop import Parts, Trainer


def tensors_of(trainer: Trainer) -> dict[str, Any]:
    """Weights, moments and random states: {"policy": {...}, "critic": {...}, "rng": {...}}."""
    parts = trainer.parts
    state: dict[str, Any] = {"policy": model_state(parts.actor.model, parts.actor.optimizer), "rng": random_state()}
    if parts.critic is not None:
        state["critic"] = model_state(parts.critic.model, parts.critic.optimizer)
    return state


def model_state(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State dicts of one model and its moments."""
    optimizer.make_state()
    return {"model": optimizer.with_masters(trained_state(model)), "optimizer": optimizer.torch_optimizer.state_dict()}


def progress_of(trainer: Trainer) -> dict[str, Any]:
    """Everything else, as JSON: counters, data position, controllers."""
    parts = trainer.parts
    return {
        "step": trainer.step_number,
        "version": trainer.version,
        "cursor": parts.cursor.state_dict(),
        "advantages": parts.advantages.state_dict(),
        "entropy": parts.entropy.state_dict(),
        "policy_optimizer": parts.actor.optimizer.state_dict(),
        "critic_optimizer": None if parts.critic is None else parts.critic.optimizer.state_dict(),
        "has_critic": parts.critic is not None,
    }


def save(
    trainer: Trainer, manager: CheckpointManager, extra: dict[str, Any], score: float | None, *, later: bool = False
) -> None:
    """Write one checkpoint of the run's present state, beside the training where `later` is set."""
    write = manager.save_later if later else manager.save
    write(trainer.step_number, tensors_of(trainer), progress_of(trainer) | extra, score=score)


def restore(trainer: Trainer, manager: CheckpointManager, path: str) -> dict[str, Any]:
    """Put the run back to a checkpoint; returns what `extra` was at the save.

    Raises CheckpointError when the checkpoint belongs to another kind of run.
    """
    parts = trainer.parts
    tensors, state = manager.load(path, tensors_of(trainer))
    if state["has_critic"] != (parts.critic is not None):
        had, has = ("a", "none") if state["has_critic"] else ("no", "one")
        raise CheckpointError(
            f"the checkpoint has {had} critic and this configuration needs {has}: algorithm.advantage must stay "
            "as it was"
        )
    load_model_state(parts.actor.model, parts.actor.optimizer, tensors["policy"], state["policy_optimizer"])
    if parts.critic is not None:
        load_model_state(parts.critic.model, parts.critic.optimizer, tensors["critic"], state["critic_optimizer"])
    parts.cursor.load_state_dict(state["cursor"])
    parts.advantages.load_state_dict(state["advantages"])
    parts.entropy.load_state_dict(state["entropy"])
    trainer.step_number, trainer.version = state["step"], state["version"]
    set_random_state(tensors["rng"])
    parts.memory.renew(parts.actor.model, trainer.version)
    return state


def restore_weights(parts: Parts, path: str) -> None:
    """The policy's weights of a checkpoint, nothing else."""
    model, optimizer = parts.actor.model, parts.actor.optimizer
    wanted = {"policy": {"model": optimizer.with_masters(trained_state(model)), "optimizer": {}}}
    tensors, state = load_checkpoint(path, wanted)
    load_trained_state(model, tensors["policy"]["model"])
    optimizer.take_masters(tensors["policy"]["model"])
    parts.memory.renew(model, state["version"])


def load_model_state(
    model: torch.nn.Module, optimizer: Optimizer, tensors: dict[str, Any], counters: dict[str, Any]
) -> None:
    """Weights, moments and counters of one model; rates, betas and decay stay those of the configuration."""
    load_trained_state(model, tensors["model"])
    optimizer.take_masters(tensors["model"])
    groups = optimizer.torch_optimizer.param_groups
    configured = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    optimizer.torch_optimizer.load_state_dict(tensors["optimizer"])
    for group, options in zip(optimizer.torch_optimizer.param_groups, configured, strict=True):
        group.update(options)
    optimizer.load_state_dict(counters)


def random_state() -> dict[str, Any]:
    """Generators of Python, NumPy and torch as tensors."""
    _, words, *_ = random.getstate()
    _, keys, position, *_ = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor(int(position)),
        "torch": torch.get_rng_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators back."""
    random.setstate((3, tuple(state["python"].tolist()), None))
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), int(state["numpy_position"]), 0, 0.0))
    torch.set_rng_state(state["torch"])
