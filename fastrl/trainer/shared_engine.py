"""Weights that an engine computes with in place: who may have them, and how an update reaches the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.config.schema import Config
from fastrl.dist.weight_plan import TensorSpec
from fastrl.dist.weight_sync import WeightsDiffer
from fastrl.dist.weight_verify import VerifySchedule
from fastrl.dist.zero_copy import SharedWeights, zero_copy_problem
from fastrl.rollout.backend import Backend, SharedTensors
from fastrl.rollout.link import DeliveryRefused
from fastrl.trainer.engine_choice import choose_engine


@dataclass
class Sharing:
    """Whether trainer and engine have their weights in common; the engine may refuse while it starts.

    Args:
        weights: the common weights; None where they are delivered, or where the engine is the trainer's own module.
        problem: why they are not common although `rollout.zero_copy` asks for it.
    """

    weights: SharedWeights | None = None
    problem: str = ""
    when_given_up: Callable[[], None] = lambda: None

    @property
    def masters(self) -> dict[str, Tensor] | None:
        """Float32 values beside the common weights by name; None where the parameters themselves are float32."""
        return None if self.weights is None or self.weights.layout.dtype == torch.float32 else self.weights.masters

    def give_up(self, why: str) -> None:
        """The engine cannot compute with the trainer's memory: from now on weights are delivered to it."""
        if self.weights is not None:
            self.weights.close()
        self.weights, self.problem = None, why.removeprefix("rollout.zero_copy: ")
        self.when_given_up()

    def lines(self) -> list[str]:
        """Why `rollout.zero_copy` was not followed, for the console; nothing where it was, or was not asked for."""
        return [f"              rollout.zero_copy is not followed: {self.problem}"] * bool(self.problem)


def share_weights(config: Config, model: nn.Module) -> Sharing:
    """The policy's weights in memory that the engine computes with, where `rollout.zero_copy` asks for it."""
    r = config.rollout
    if not r.zero_copy:
        return Sharing()
    if choose_engine(config).name != "vllm":
        return Sharing(problem="the embedded engine computes with the trainer's own module anyway")
    if r.devices is not None:
        return Sharing(problem=f"rollout.devices = {r.devices} puts the engine on another device")
    if config.parallel.offload == "parameters":
        return Sharing(problem="parallel.offload = parameters moves what it would share")
    problem = zero_copy_problem(model, one_process=r.vllm_in_process)
    if problem is not None:
        return Sharing(problem=problem)
    weights = SharedWeights(
        model,
        dtype=getattr(torch, config.run.dtype),
        timeout_s=r.engine_timeout_s,
        one_process=r.vllm_in_process,
    )
    if weights.layout.dtype == torch.float32:
        weights.masters.clear()  # what the parameters were before; the optimizer steps in the common memory
    return Sharing(weights)


class SharedSender:
    """`SharedWeights` as a `ProcessLink` wants them: an update is a message."""

    def __init__(self, shared: SharedWeights, timeout_s: float, verify: str) -> None:
        self.shared, self.timeout_s, self.schedule = shared, timeout_s, VerifySchedule(verify)
        self.engines = 0

    def address(self) -> dict[str, Any]:
        """Where the child finds the memory."""
        return {"address": self.shared.address, "token": self.shared.token, "timeout_s": self.timeout_s}

    def send(self, model: nn.Module, version: int) -> None:
        """Tell the engine; see Sender.send."""
        if self.shared.engines != self.engines:
            self.engines = self.shared.engines
            self.schedule.restart()
        try:
            self.shared.publish(version, verify=self.schedule.due())
        except WeightsDiffer as error:
            raise DeliveryRefused(str(error)) from error

    def take_part(self) -> None:
        """Nothing is gathered: there is one rank."""

    def close(self) -> None:
        """Close the line; the parameters keep the memory."""
        self.shared.close()


def shared_tensors(shared: SharedWeights) -> SharedTensors:
    """The common weights for a backend in this process."""
    return SharedTensors(lambda wanted: shared.fit([TensorSpec(*fields) for fields in wanted]), shared.layout.num_bytes)


def note_update(shared: SharedWeights) -> Callable[[Backend, nn.Module, int], None]:
    """An update of a backend in this process: its weights are new already, what it has cached is old."""

    def deliver(backend: Backend, model: nn.Module, version: int) -> None:
        shared.check_views()
        backend.reset_prefix_cache()

    return deliver
