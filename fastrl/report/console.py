"""The terminal: a live table where there is one, one parseable line a step otherwise, or nothing."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fastrl.report.text import cells, duration, step_line, time_split

Values = Mapping[str, float]

PHASE_WORDS = {
    "generate": "generating",
    "reward": "scoring",
    "exchange": "exchanging sequences",
    "old_log_prob": "old log-probs",
    "reference": "reference log-probs",
    "values": "critic values",
    "advantage": "advantages",
    "update_critic": "updating the critic",
    "update_actor": "updating the policy",
    "sync_weights": "handing over weights",
    "checkpoint": "saving",
    "validate": "validating",
}
TABLE_ROWS = 12
MESSAGES = 4
REFRESHES_PER_S = 4


class Screen(Protocol):
    """What a run shows on; `RunLogger` decides what to say."""

    total_steps: int

    def header(self, title: str, lines: Sequence[str]) -> None: ...

    def phase(self, name: str) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...

    def message(self, kind: str, text: str) -> None: ...

    def step(self, step: int, values: Values, *, change: float | None, eta_s: float | None) -> None: ...

    def close(self) -> None: ...


class QuietScreen:
    """Shows warnings on stderr and nothing else."""

    def __init__(self, total_steps: int = 0, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.stream = stream or sys.stderr

    def header(self, title: str, lines: Sequence[str]) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        pass

    def message(self, kind: str, text: str) -> None:
        if kind == "warning":
            print(f"warning: {text}", file=self.stream, flush=True)

    def step(self, step: int, values: Values, *, change: float | None, eta_s: float | None) -> None:
        pass

    def close(self) -> None:
        pass


class PlainScreen:
    """One line a step on stdout; for logs, pipes and programs."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.stream = stream or sys.stdout

    def header(self, title: str, lines: Sequence[str]) -> None:
        self._print(title)
        for line in lines:
            self._print(f"  {line}")

    def phase(self, name: str) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        pass

    def message(self, kind: str, text: str) -> None:
        self._print(text if kind == "info" else f"{kind} {text}")

    def step(self, step: int, values: Values, *, change: float | None, eta_s: float | None) -> None:
        self._print(step_line(step, self.total_steps, values, change=change, eta_s=eta_s))

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class LiveScreen:
    """A table of the last steps, the phase with its progress, and what there is to say, redrawn in place."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self.console = console or Console()
        self._title = ""
        self._rows: deque[tuple[int, Values, float | None]] = deque(maxlen=TABLE_ROWS)
        self._messages: deque[tuple[str, str]] = deque(maxlen=MESSAGES)
        self._phase, self._phase_start = "starting", time.monotonic()
        self._progress: tuple[int, int] | None = None
        self._start = time.monotonic()
        self._step, self._eta_s, self._eta_at = 0, None, time.monotonic()  # type: tuple[int, float | None, float]
        self._live = Live(
            get_renderable=self.render, console=self.console, refresh_per_second=REFRESHES_PER_S, transient=False
        )

    def header(self, title: str, lines: Sequence[str]) -> None:
        self._title = title
        self.console.print(Text(title, style="bold"))
        for line in lines:
            self.console.print(Text(f"  {line}", style="dim"))
        self._live.start()

    def phase(self, name: str) -> None:
        self._phase, self._phase_start, self._progress = name, time.monotonic(), None

    def progress(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase and phase != "generate":
            self.phase(phase)
        self._progress = (done, total)

    def message(self, kind: str, text: str) -> None:
        if kind == "info" or not self._live.is_started:
            self.console.print(Text(text if kind == "info" else f"{kind} {text}", style=_STYLES.get(kind, "")))
        else:
            self._messages.append((kind, text))

    def step(self, step: int, values: Values, *, change: float | None, eta_s: float | None) -> None:
        self._step, self._eta_s, self._eta_at = step, eta_s, time.monotonic()
        self._rows.append((step, values, change))

    def close(self) -> None:
        self._phase = "done"
        self._progress = None
        if self._live.is_started:
            self._live.stop()

    def render(self) -> RenderableType:
        """The picture of now."""
        parts: list[RenderableType] = [Rule(style="dim"), self._status()]
        if self._rows:
            parts.append(self._table())
        parts += [Text(f"{kind} {text}", style=_STYLES.get(kind, "")) for kind, text in self._messages]
        return Group(*parts)

    def _status(self) -> RenderableType:
        now = time.monotonic()
        grid = Table.grid(padding=(0, 2))
        eta = "" if self._eta_s is None else f"eta {duration(self._eta_s - (now - self._eta_at))}"
        grid.add_row(
            Text(f"step {self._step}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(self.total_steps, 1), completed=self._step, width=24),
            Text(f"elapsed {duration(now - self._start)}"),
            Text(eta),
        )
        words = PHASE_WORDS.get(self._phase, self._phase)
        done, total = self._progress or (0, 0)
        bar: RenderableType = ProgressBar(total=total, completed=done, width=24) if total else Text("")
        count = f"{done}/{total}" if total else ""
        grid.add_row(Text(words), bar, Text(count), Text(f"{now - self._phase_start:.0f}s", style="dim"))
        return grid

    def _table(self) -> Table:
        shown = [(step, cells(values), values, change) for step, values, change in self._rows]
        labels = [label for label in _COLUMNS if any(label in found for _, found, _, _ in shown)]
        table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
        for label in ("step", *labels, "seconds"):
            table.add_column(label, justify="right", no_wrap=True)
        for i, (step, found, values, change) in enumerate(shown):
            split = time_split(values)
            seconds = values.get("time/step_s", sum(split.values()))
            row = [Text(str(step)), *(_cell(label, found.get(label, ""), change) for label in labels)]
            row.append(Text(f"{seconds:.1f}"))
            table.add_row(*row, style="bold" if i == len(shown) - 1 else "")
        return table


_COLUMNS = ("reward", "val", "kl", "entropy", "value loss", "clip", "len", "cut", "mismatch", "tok/s", "mem")
_STYLES = {"warning": "yellow", "health": "yellow", "error": "bold red"}


def _cell(label: str, text: str, change: float | None) -> Text:
    cell = Text(text)
    if label == "reward" and change is not None:
        cell.append(" ▲" if change >= 0 else " ▼", style="green" if change >= 0 else "red")
    return cell


def make_screen(mode: str, total_steps: int, *, stream: TextIO | None = None) -> Screen:
    """The screen for `logging.console`: live, plain or quiet; auto is live on a terminal that can redraw.

    Args:
        mode: auto, live, plain or quiet.
        total_steps: of the run, for `step 3/200`.
        stream: where to; stdout by default.
    """
    if mode == "quiet":
        return QuietScreen()
    if mode == "live" or (mode == "auto" and _can_redraw(stream or sys.stdout)):
        options: dict[str, Any] = {"force_terminal": True} if mode == "live" else {}
        return LiveScreen(total_steps, Console(file=stream, **options))
    return PlainScreen(total_steps, stream)


def _can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "CI" not in os.environ
