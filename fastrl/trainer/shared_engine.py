"""Weights that an engine process computes with in place: who may have them, and how an update reaches the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastrl.config.schema import Config
from fastrl.dist.weight_verify import VerifySchedule
from fastrl.dist.zero_copy import SharedWeights, zero_copy_problem
from fastrl.trainer.engine_choice import choose_engine


class SharedSender:
    """`SharedWeights` as a `ProcessLink` wants them: an update is a message."""

    def __init__(self, shared: SharedWeights, timeout_s: float, verify: str) -> None:
        self.shared, self.timeout_s, self.schedule = shared, timeout_s, VerifySchedule(verify)

    def address(self) -> dict[str, Any]:
        """Where the child finds the memory."""
        return address_of(self.shared, self.timeout_s)

    def send(self, model: nn.Module, version: int) -> None:
        """Tell the engine; see Sender.send."""
        self.shared.publish(version, verify=self.schedule.due())

    def take_part(self) -> None:
        """Nothing is gathered: there is one rank."""

    def close(self) -> None:
        """Close the line; the parameters keep the memory."""
        self.shared.close()


def address_of(shared: SharedWeights, timeout_s: float) -> dict[str, Any]:
    """What an engine process needs to map the weights."""
    return {"address": shared.address, "token": shared.token, "timeout_s": timeout_s}


def share_weights(config: Config, model: nn.Module) -> tuple[SharedWeights | None, str]:
    """The policy's weights in memory that the engine computes with, where `rollout.zero_copy` asks for it.

    Returns:
        the shared weights, or None and why they are delivered instead ("" where nobody asked).
    """
    r = config.rollout
    if not r.zero_copy:
        return None, ""
    if choose_engine(config).name != "vllm" or r.vllm_in_process:
        return None, "the engine is in the trainer's process"
    if config.parallel.offload in ("optimizer", "parameters"):
        return None, f"parallel.offload = {config.parallel.offload} moves what it would share"
    problem = zero_copy_problem(model)
    if problem is not None:
        return None, problem
    return SharedWeights(model, dtype=getattr(torch, config.run.dtype), timeout_s=r.engine_timeout_s), ""
