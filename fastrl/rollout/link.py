"""How an `ExternalEngine` reaches its backend: in this process here, in a child of its own in `process_link.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from fastrl.errors import EngineError
from fastrl.rollout.backend import Backend, BackendInfo, BackendSettings, Draw, Drawn, Load
from fastrl.rollout.engine import SamplingParams, WakePart


class EngineDied(EngineError):
    """The engine's process is gone; the message says how it ended. What it was asked for can be asked of a new one."""


class DeliveryRefused(EngineError):
    """The engine needs other tensors than the trainer has, or received other bytes than were sent. Ends the run."""


class Link(Protocol):
    """One backend within reach. Every method may raise EngineDied; then only `restart` and `close` are left."""

    settings: BackendSettings

    def start(self) -> None:
        """Begin to start the backend; returns at once where that takes place elsewhere."""
        ...

    def wait_ready(self) -> BackendInfo:
        """What the backend says when it is ready. Raises EngineError when it cannot start."""
        ...

    def generate(self, draws: Sequence[Draw], params: SamplingParams) -> Iterator[Drawn]:
        """Samples as they finish. Closing the iterator drops the rest."""
        ...

    def update(self, model: nn.Module, version: int) -> None:
        """Deliver the weights of `model`, all or none."""
        ...

    def sleep(self, level: int) -> None: ...

    def wake(self, what: Sequence[WakePart]) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def abort(self) -> None:
        """End the running generate soon; any thread may call it."""
        ...

    def load(self) -> Load:
        """How busy the backend was when it last said so."""
        ...

    def alive(self) -> str:
        """Empty when all is well, else what is wrong."""
        ...

    def restart(self) -> None:
        """A new backend in the place of one that died."""
        ...

    def close(self) -> None: ...


class LocalLink:
    """A backend in this process. It cannot be restarted: what kills it kills the trainer.

    Args:
        make_backend: makes it from its settings.
        settings: of the backend.
        deliver: loads the weights of a model into the backend: all, or none when they do not fit.
    """

    def __init__(
        self,
        make_backend: Callable[[BackendSettings], Backend],
        settings: BackendSettings,
        deliver: Callable[[Backend, nn.Module, int], None],
    ) -> None:
        self.make_backend, self.settings, self.deliver = make_backend, settings, deliver
        self.backend: Backend | None = None
        self._abort = threading.Event()

    def start(self) -> None:
        """Made on first use: it takes this process's time."""

    def wait_ready(self) -> BackendInfo:
        """Make the backend if there is none yet."""
        return self._ready().info

    def _ready(self) -> Backend:
        if self.backend is None:
            self.backend = self.make_backend(self.settings)
        return self.backend

    def generate(self, draws: Sequence[Draw], params: SamplingParams) -> Iterator[Drawn]:
        """Samples as they finish."""
        backend = self._ready()
        self._abort.clear()
        try:
            backend.add(draws, params)
            while backend.busy():
                yield from backend.abort() if backend.agree(self._abort.is_set()) else backend.step()
        finally:
            if backend.busy():
                backend.abort()

    def update(self, model: nn.Module, version: int) -> None:
        """Deliver the weights of `model`."""
        self.deliver(self._ready(), model, version)

    def sleep(self, level: int) -> None:
        """Give memory back."""
        self._ready().sleep(level)

    def wake(self, what: Sequence[WakePart]) -> None:
        """Take memory again."""
        self._ready().wake(what)

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        self._ready().reset_prefix_cache()

    def abort(self) -> None:
        """End the running generate at its next step."""
        self._abort.set()

    def load(self) -> Load:
        """How busy the backend is."""
        return Load() if self.backend is None else self.backend.load()

    def alive(self) -> str:
        """It lives as long as the trainer."""
        return ""

    def restart(self) -> None:
        """Impossible in this process."""
        raise EngineError("an engine in the trainer's process cannot be restarted: set rollout.vllm_in_process=false")

    def close(self) -> None:
        """Free the backend."""
        if self.backend is not None:
            self.backend.close()
            self.backend = None


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as they travel."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(params).items()}


def params_from_json(fields: dict[str, Any]) -> SamplingParams:
    """The inverse of `params_to_json`."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return SamplingParams(**values)
