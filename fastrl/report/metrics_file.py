"""`metrics.jsonl`: one JSON object per step, flushed line by line, cut back when a run resumes from an earlier step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.errors import DataError

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends one line per step: {"step": 42, "time": unix seconds, "reward/mean": ..., ...}; NaN and inf are null."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (closed in close)

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Writes and flushes the line of a step."""
        row: dict[str, Any] = {"step": int(step), "time": round(time, 3)}
        for name in sorted(values):
            number = float(values[name])
            row[name] = number if math.isfinite(number) else None
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; what was written stays."""
        self._file.close()


def forget_after(path: str | Path, step: int) -> int:
    """Drops the lines of later steps and a half-written last line; returns how many went. Atomic."""
    path = Path(path)
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _is_until(line, step)]
    if len(kept) < len(lines):
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
    return len(lines) - len(kept)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run folder's metrics.jsonl (or of such a file), in order of steps; a null value is left out.

    Raises:
        DataError: there is no such file, or a line other than an unfinished last one is not JSON.
    """
    path = Path(run)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{run}: no {FILE_NAME} there, so no run has been logged in it")
    rows = {row["step"]: row for row in _rows(path)}
    return [rows[step] for step in sorted(rows)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            yield {"step": int(row["step"]), **{k: v for k, v in row.items() if v is not None}}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number < len(lines):
                raise DataError(f"{path}:{number}: not a line of metrics ({error})") from None


def _is_until(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return False
