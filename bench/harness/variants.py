"""The ways of computing one thing: here, or in a peer's process. All are asked the same questions."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.harness.calls import checked, peak_bytes, seconds

_numbers = itertools.count()


class Variant(Protocol):
    """One way of computing a case."""

    clock: str

    def result(self) -> tuple[list[torch.Tensor], float]:
        """Call once: the tensors of the result, and about how many seconds it took."""

    def seconds(self, loops: int) -> float:
        """CPU seconds of one call."""

    def peak_bytes(self) -> int | None:
        """Memory of one call above its inputs."""

    def close(self) -> None:
        """Let go of inputs."""


class Local:
    """A function of this process."""

    def __init__(self, run: Callable[[], Any], *, clock: str = "thread") -> None:
        self.run, self.clock = run, clock

    def result(self) -> tuple[list[torch.Tensor], float]:
        return checked(self.run, self.clock)

    def seconds(self, loops: int) -> float:
        return seconds(self.run, loops, self.clock)

    def peak_bytes(self) -> int | None:
        return peak_bytes(self.run)

    def close(self) -> None:
        del self.run


class Inputs:
    """Tensors that peers' processes read from a file, written once."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors
        self.folder = tempfile.TemporaryDirectory(prefix="bench_")
        self.path = str(Path(self.folder.name) / "inputs.pt")
        self.written = False

    def file(self) -> str:
        """Its path."""
        if not self.written:
            torch.save(self.tensors, self.path)
            self.written = True
        return self.path


class Remote:
    """A function of a peer's process; `function` is "module:name" there, called as name(inputs, **options)."""

    def __init__(
        self, ask: Callable[..., dict], function: str, inputs: Inputs, /, *, clock: str = "thread", **options: Any
    ) -> None:
        self.ask, self.inputs, self.clock = ask, inputs, clock
        self.key = f"{function} {next(_numbers)}"
        ask(do="make", key=self.key, function=function, inputs=inputs.file(), options=options)

    def result(self) -> tuple[list[torch.Tensor], float]:
        path = Path(self.inputs.folder.name) / f"result_{next(_numbers)}.pt"
        taken = self.ask(do="result", key=self.key, path=str(path), clock=self.clock)["seconds"]
        found = torch.load(path, weights_only=True)
        path.unlink()
        return found, taken

    def seconds(self, loops: int) -> float:
        return self.ask(do="time", key=self.key, loops=loops, clock=self.clock)["seconds"]

    def peak_bytes(self) -> int | None:
        return self.ask(do="peak", key=self.key)["bytes"]

    def close(self) -> None:
        self.ask(do="drop", key=self.key)
