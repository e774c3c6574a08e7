"""What the trainer tells the outside world while it runs; the command line hands in one that shows and stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Reporter(Protocol):
    """Receives everything a run has to say. All ranks call it; only the first one's calls show."""

    def plan(self, lines: Sequence[str]) -> None:
        """The plan, before step 1."""

    def phase(self, name: str) -> None:
        """A phase of the step begins (`Metrics(on_phase=reporter.phase)`)."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """A long phase has come so far."""

    def info(self, text: str) -> None:
        """Something worth a line: a checkpoint was saved, a run resumed."""

    def warning(self, text: str) -> None:
        """Something that went wrong and did not stop the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a finished step (step 0: validation before training). Once per step."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the reporter: tracker run ids, time so far. JSON-able."""

    def close(self, status: str = "finished") -> None:
        """The end: `finished`, `failed` or `interrupted`."""


class Silent:
    """A reporter for tests and for use as a library: says nothing, keeps nothing."""

    def plan(self, lines: Sequence[str]) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        pass

    def info(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self, status: str = "finished") -> None:
        pass
