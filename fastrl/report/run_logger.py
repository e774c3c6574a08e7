"""The reporter of a real run: terminal, log.txt, metrics.jsonl, health lines and trackers, one call each.

with RunLogger(folder, total_steps=200, trackers=("tensorboard",)) as logger:
    logger.plan(describe(config))
    logger.log(step, values)
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from fastrl.dist.collectives import rank
from fastrl.errors import Terminated
from fastrl.report.console import Screen, make_screen
from fastrl.report.health import HISTORY_STEPS, HealthWatch
from fastrl.report.metrics_file import FILE_NAME, MetricsFile, forget_after, read_metrics
from fastrl.report.text import duration, step_line
from fastrl.report.tracking import Trackers, check_installed
from fastrl.rollout.records import RolloutWriter

PACKAGE = Path(__file__).resolve().parents[1]
CHANGE_STEPS = 10  # the reward's change is against the mean of so many steps before
SPEED_STEPS = 20  # the time left follows from the speed of so many steps


class RunLogger:
    """Implements `fastrl.trainer.reporter.Reporter`.

    Args:
        folder: the run folder; made when missing.
        total_steps: training steps of the run.
        console: auto, live, plain or quiet.
        trackers: names of experiment trackers.
        project, name: what the trackers call the project and the run; the name defaults to the folder's.
        config: the resolved configuration, stored by trackers.
        resumed_step: the step training goes on from; lines and samples of later steps are removed. None is a new run.
        saved: `state_dict()` of the checkpoint resumed from.
        is_main: False makes every method do nothing (the other ranks); their warnings still reach log.txt.
        stream: where the terminal output goes; stdout by default.

    Raises:
        ConfigError: a tracker's package is not installed (names the command that installs it).
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int = 0,
        console: str = "auto",
        trackers: Sequence[str] = (),
        project: str = "fastrl",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
        saved: Mapping[str, Any] | None = None,
        is_main: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.is_main = is_main
        self.name = name or self.folder.resolve().name
        saved = saved or {}
        check_installed(trackers)
        self._log = open(self.folder / "log.txt", "a", encoding="utf-8")  # noqa: SIM115  (closed in close)
        if is_main and resumed_step is not None:
            forget_after(self.folder / FILE_NAME, resumed_step)
            RolloutWriter(self.folder / "rollouts").forget_after(resumed_step)
        self.metrics = MetricsFile(self.folder / FILE_NAME) if is_main else None
        self.screen: Screen = make_screen(console if is_main else "quiet", total_steps, stream=stream)
        self.health = HealthWatch()
        self._rewards: deque[float] = deque(maxlen=CHANGE_STEPS)
        self._times: deque[tuple[int, float]] = deque(maxlen=SPEED_STEPS + 1)
        if is_main and resumed_step is not None:
            self._recall()
        self._seconds_before = float(saved.get("seconds", 0.0))
        self._started = time.monotonic()
        self._closed = False
        self._capture = _Capture(self)
        self.trackers = Trackers.start(
            trackers if is_main else (),
            folder=self.folder,
            project=project,
            name=self.name,
            config=config or {},
            run_ids=saved.get("trackers", {}),
            resumed_step=resumed_step,
            on_trouble=self.warning,
        )

    @property
    def total_steps(self) -> int:
        """Training steps of the run; may be set when they are known, after the data are loaded."""
        return self.screen.total_steps

    @total_steps.setter
    def total_steps(self, number: int) -> None:
        self.screen.total_steps = number

    def plan(self, lines: Sequence[str]) -> None:
        """Shows the header: the run folder and the plan."""
        if self.is_main:
            title = f"fastrl  {self.folder}"
            self._write(title, *(f"  {line}" for line in lines))
            self.screen.header(title, lines)
        self._times.append((-1, time.monotonic()))

    def phase(self, name: str) -> None:
        """A phase begins."""
        if self.is_main:
            self.screen.phase(name)

    def progress(self, phase: str, done: int, total: int) -> None:
        """A phase has come so far."""
        if self.is_main:
            self.screen.progress(phase, done, total)

    def info(self, text: str) -> None:
        """One line on the terminal and in log.txt."""
        self._say("info", text)

    def warning(self, text: str) -> None:
        """One line on the terminal and in log.txt, marked as a warning."""
        self._say("warning", text)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a finished step everywhere. Once per step; step 0 is validation before training."""
        if not self.is_main or self.metrics is None:
            return
        shown = {"time/total_s": self.seconds(), **values}
        self.metrics.write(step, time.time(), shown)
        change = self._change(shown.get("reward/mean"))
        eta_s = self._eta_s(step)
        self._write(step_line(step, self.total_steps, shown, change=change, eta_s=eta_s))
        self.screen.step(step, shown, change=change, eta_s=eta_s)
        for line in self.health.check(step, shown):
            self._say("health", line)
        self.trackers.log(step, shown)

    def seconds(self) -> float:
        """Wall time of the run, time before a resume included."""
        return self._seconds_before + time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Tracker run ids and the time so far, for the checkpoint."""
        return {"trackers": self.trackers.run_ids(), "seconds": self.seconds()}

    def close(self, status: str = "finished") -> None:
        """Ends terminal, trackers and files; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._capture.stop()
        self.screen.close()
        try:
            if self.is_main:
                self._say("info", f"{status} after {duration(self.seconds())}  {self.folder}")
        finally:
            self.trackers.close(status)
            if self.metrics is not None:
                self.metrics.close()
            self._log.close()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | Terminated)
        status = "interrupted" if interrupted else "failed" if kind is not None else "finished"
        # A full disk ends a run, and must not keep the terminal from coming back or hide what ended it.
        with contextlib.suppress(OSError):
            if error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit, Terminated)):
                self._write(*traceback.format_exception(kind, error, trace))
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self.close(status)

    def _recall(self) -> None:
        """Trend and health rules go on from the steps that are kept."""
        for row in read_metrics(self.folder)[-HISTORY_STEPS:]:
            values = {name: value for name, value in row.items() if name not in ("step", "time")}
            self.health.remember(values)
            self._change(values.get("reward/mean"))

    def _say(self, kind: str, text: str) -> None:
        self._write(text if kind == "info" else f"{kind} {text}")
        if self.is_main:
            self.screen.message(kind, text)

    def _write(self, *lines: str) -> None:
        """To log.txt, each line with the time of day; whole lines in one write, so that ranks do not mix."""
        if self._log.closed:
            return
        stamp = datetime.now().strftime("%H:%M:%S") + ("" if self.is_main else f" [rank {rank()}]")
        text = "".join(f"{stamp} {part}\n" for line in lines for part in line.rstrip("\n").split("\n"))
        self._log.write(text)
        self._log.flush()

    def _change(self, reward: float | None) -> float | None:
        if reward is None:
            return None
        before = sum(self._rewards) / len(self._rewards) if self._rewards else None
        self._rewards.append(reward)
        return None if before is None else reward - before

    def _eta_s(self, step: int) -> float | None:
        """Seconds left at the speed of the last steps; the first one counts from the plan, or from step 0."""
        now = time.monotonic()
        if step == 0:
            self._times.clear()
        elif self._times and self._times[0][0] < 0:
            self._times[0] = (step - 1, self._times[0][1])
        self._times.append((step, now))
        first_step, first_time = self._times[0]
        if step <= first_step or step < 1:
            return None
        return (self.total_steps - step) * (now - first_time) / (step - first_step)


class _Capture(logging.Handler):
    """Brings Python warnings and WARNING records of any library to the logger, each text once."""

    def __init__(self, logger: RunLogger) -> None:
        super().__init__(logging.WARNING)
        self.logger = logger
        self._seen: set[str] = set()
        self._show = warnings.showwarning
        warnings.showwarning = self._on_warning
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(record.getMessage())
        except Exception:  # a message that cannot be formatted must not end the run
            self.handleError(record)

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)
        if warnings.showwarning == self._on_warning:
            warnings.showwarning = self._show

    def _on_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        ours = category is UserWarning and Path(filename).is_relative_to(PACKAGE)  # meant for the user as it stands
        self._say(str(message) if ours else f"{category.__name__}: {message} ({filename}:{lineno})")

    def _say(self, text: str) -> None:
        if text not in self._seen:
            self._seen.add(text)
            self.logger.warning(text)
