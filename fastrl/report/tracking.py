"""Experiment trackers that cannot hurt a run: each in a thread of its own, trouble caught, counted and said once."""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrl.errors import ConfigError
from fastrl.report.tracker_backends import Backend, MLflow, RunInfo, SwanLab, TensorBoard, Wandb, finite

START_TIMEOUT_S = 40.0  # how long a run waits for a tracker to open; it goes on without the id then
CLOSE_TIMEOUT_S = 30.0  # how long the end of a run waits for what is still in the queue
QUEUE_STEPS = 1000  # steps a slow tracker may lag behind before values are dropped

BACKENDS: dict[str, tuple[str, Callable[[], Backend]]] = {  # name -> (module it needs, class)
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
    "swanlab": ("swanlab", SwanLab),
    "mlflow": ("mlflow", MLflow),
}


class Trackers:
    """The trackers of a run. `log` returns at once, whatever the network does."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = list(workers)

    @classmethod
    def start(
        cls,
        names: Sequence[str],
        *,
        folder: Path,
        project: str,
        name: str,
        config: Mapping[str, Any],
        run_ids: Mapping[str, str] | None = None,
        resumed_step: int | None = None,
        on_trouble: Callable[[str], None] = print,
    ) -> Trackers:
        """Opens the trackers; those that fail to open are said and left out.

        Args:
            names: of `BACKENDS`.
            run_ids: tracker -> id of the run to continue (`run_ids()` of the earlier process).
            resumed_step: the step training goes on from.
            on_trouble: called with one line, once per tracker and kind of trouble, from any thread.

        Raises:
            ConfigError: an unknown name, or a package is missing (names the command that installs it).
        """
        check_installed(names)
        workers = []
        for tracker in names:
            info = RunInfo(folder, project, name, dict(config), (run_ids or {}).get(tracker), resumed_step)
            workers.append(_Worker(tracker, BACKENDS[tracker][1], info, on_trouble))
        for worker in workers:
            worker.wait_until_open(START_TIMEOUT_S)
        return cls(workers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hands the finite values to every tracker."""
        numbers = finite(values)
        for worker in self._workers:
            worker.put(step, numbers)

    def run_ids(self) -> dict[str, str]:
        """Tracker -> id of its run, for the checkpoint."""
        return {worker.name: worker.run_id for worker in self._workers if worker.run_id}

    def troubles(self) -> dict[str, int]:
        """Tracker -> steps that did not reach it."""
        return {worker.name: worker.num_lost for worker in self._workers}

    def close(self, status: str = "finished") -> None:
        """Lets the trackers finish what is queued, for a bounded time."""
        for worker in self._workers:
            worker.ask_to_finish(status)
        for worker in self._workers:
            worker.wait_until_finished(CLOSE_TIMEOUT_S)


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for a tracker that is unknown or whose package is missing (names the command)."""
    for tracker in names:
        if tracker not in BACKENDS:
            raise ConfigError(f"logging.trackers: {tracker} is not one of {', '.join(BACKENDS)}")
        if importlib.util.find_spec(BACKENDS[tracker][0]) is None:
            raise ConfigError(f"logging.trackers: {tracker} is not installed: pip install 'fastrl[{tracker}]'")


class _Worker:
    """One tracker on one daemon thread: a hanging network can neither delay a step nor keep the process alive."""

    def __init__(
        self, name: str, make: Callable[[], Backend], info: RunInfo, on_trouble: Callable[[str], None]
    ) -> None:
        self.name = name
        self.run_id = info.run_id or ""
        self.num_lost = 0
        self._on_trouble = on_trouble
        self._said: set[str] = set()
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(QUEUE_STEPS)
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make, info), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self._queue.put_nowait(("log", (step, values)))
        except queue.Full:
            self.num_lost += 1
            self._trouble("is too slow, so values are dropped")

    def wait_until_open(self, timeout_s: float) -> None:
        if not self._open.wait(timeout_s):
            self._trouble(f"has not opened its run after {timeout_s:.0f} s; training goes on")

    def ask_to_finish(self, status: str) -> None:
        try:
            self._queue.put_nowait(("finish", status))
        except queue.Full:
            self._trouble("is too slow to be ended properly")

    def wait_until_finished(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._trouble(f"did not finish within {timeout_s:.0f} s; its last values may be missing")

    def _work(self, make: Callable[[], Backend], info: RunInfo) -> None:
        backend: Backend | None = None
        try:
            backend = make()
            self.run_id = backend.start(info) or self.run_id
        except BaseException as error:  # SystemExit included: some trackers call sys.exit
            backend = None
            self._trouble(f"could not be opened: {_one_line(error)}; training goes on without it")
        self._open.set()
        while True:
            what, payload = self._queue.get()
            try:
                if backend is None:
                    self.num_lost += what == "log"
                elif what == "log":
                    backend.log(*payload)
                else:
                    backend.finish(payload)
            except BaseException as error:
                self.num_lost += what == "log"
                self._trouble(f"failed: {_one_line(error)}; training goes on")
            if what == "finish":
                return

    def _trouble(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            self._on_trouble(f"tracker {self.name} {text}")


def _one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
