"""Who holds the device's memory when: generate -> train -> deliver -> generate.

    generate   engine awake, trainer offloaded as far as asked
    train      engine asleep, trainer on the device
    deliver    engine's weights awake (no keys and values yet), trainer on the device
    generate   weights are new, trainer offloaded again, then keys and values

The order is what keeps the peak low: keys and values come last, after the trainer has made room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from fastrl.errors import TrainingError
from fastrl.rollout.engine import Engine

Phase = Literal["generate", "train"]
Offload = Literal["none", "optimizer", "all"]


class Movable(Protocol):
    """The part of the trainer that can leave the device."""

    def to_host(self) -> None:
        """Move it to main memory."""
        ...

    def to_device(self) -> None:
        """Move it back."""
        ...


@dataclass
class Choreography:
    """The memory of one rank as a state machine.

    Args:
        engine: of the run.
        sleep_level: what the engine gives back while the policy trains (`Engine.sleep`); None: it has a GPU of its own
            and never sleeps.
        movable: what the trainer moves away while samples are generated, in this order; back in reverse.
    """

    engine: Engine
    sleep_level: int | None = 1
    movable: tuple[Movable, ...] = ()
    phase: Phase = "generate"
    restarts_seen: int = 0

    def begin(self, wait: bool) -> None:
        """Start the engine with the trainer out of its way; `open` then gives it its first weights.

        Args:
            wait: the engine takes its share of the device's memory now, and measures what others take meanwhile.
        """
        start = getattr(self.engine, "start", None)
        if start is None:
            return
        for part in self.movable:
            part.to_host()
        start()
        if wait:
            self.engine.ready()  # type: ignore[attr-defined]
            self.train()

    def open(self, model: nn.Module, version: int) -> None:
        """Before samples are asked for outside of the steps: everything is where generation needs it."""
        if self.phase == "train":
            self.generate(model, version, changed=True)

    def renew(self, model: nn.Module, version: int) -> None:
        """The weights were replaced from outside, by a checkpoint: the engine gets them before its next sample."""
        if self.phase == "generate":
            with self.trainer_present():
                self.engine.update_weights(model, version)

    def train(self) -> None:
        """Samples are there: the engine's memory is training's now."""
        self._expect("generate", "train")
        if self.sleep_level is not None:
            self.engine.sleep(self.sleep_level)
        for part in reversed(self.movable):
            part.to_device()
        self.phase = "train"

    def generate(self, model: nn.Module, version: int, *, changed: bool) -> None:
        """Training is done: deliver weights where they changed or were lost, then make room for keys and values.

        Args:
            model: the policy.
            version: of its weights.
            changed: whether they differ from what the engine was given last.
        """
        self._expect("train", "generate")
        sleeps = self.sleep_level is not None
        if sleeps:
            self.engine.wake(("weights",))
        if changed or (self.sleep_level or 0) >= 2:
            self.engine.update_weights(model, version)
        for part in self.movable:
            part.to_host()
        if sleeps:
            self.engine.wake(("kv",))
        self.phase = "generate"

    @contextmanager
    def trainer_present(self) -> Iterator[None]:
        """Everything of the trainer on the device, for what is neither generation nor training (a checkpoint)."""
        moved = self.movable if self.phase == "generate" else ()
        for part in reversed(moved):
            part.to_device()
        yield
        for part in moved:
            part.to_host()

    def new_restarts(self) -> int:
        """How often the engine died and was started again since this was last asked."""
        before, self.restarts_seen = self.restarts_seen, self.engine.health().restarts
        return self.restarts_seen - before

    def _expect(self, phase: Phase, wanted: Phase) -> None:
        if self.phase != phase:
            raise TrainingError(f"the trainer's memory goes to {wanted} from {phase}, it is in {self.phase}")


class OptimizerState:
    """The moments of an optimizer as a movable part."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device

    def to_host(self) -> None:
        """Moments to main memory."""
        self._move(torch.device("cpu"))

    def to_device(self) -> None:
        """Moments back."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # step counts stay where they are
                    state[name] = value.to(device)


class Parameters:
    """The parameters of a model as a movable part."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device

    def to_host(self) -> None:
        """Parameters to main memory."""
        nn.Module.to(self.model, "cpu")

    def to_device(self) -> None:
        """Parameters back."""
        nn.Module.to(self.model, self.device)


def movable_parts(
    offload: Offload, models: Sequence[tuple[nn.Module, torch.optim.Optimizer]], device: torch.device
) -> tuple[Movable, ...]:
    """What `rollout.offload` asks for; nothing on a CPU, where there is one memory."""
    if offload == "none" or device.type == "cpu":
        return ()
    parts: list[Movable] = [OptimizerState(optimizer, device) for _, optimizer in models]
    if offload == "all":
        parts += [Parameters(model, device) for model, _ in models]
    return tuple(parts)
