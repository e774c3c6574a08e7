"""Generated samples on disk: `rollouts/step_000042.jsonl`, one JSON object per sample, readable by anything.

writer = RolloutWriter("runs/a/rollouts", max_samples=64)
writer.write(42, records)
for record in read_step("runs/a/rollouts", 42): ...
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fastrl.errors import DataError

_NAME = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class RolloutRecord:
    """One response, as a person wants to read it. Numbers that are not finite are stored as null."""

    step: int
    sample_id: int  # unique within the step
    group_id: int  # one per prompt occurrence
    prompt: str
    response: str
    score: float | None  # after weights and shaping; None could not be scored
    finish_reason: str  # stop, length, abort
    length: int  # response tokens
    components: dict[str, float | None] = field(default_factory=dict)  # None abstained
    advantage: float | None = None  # mean over the response's tokens
    policy_version: int | None = None  # weight updates the engine had seen
    data_source: str = ""
    answer: Any = None  # reference answer, where it is plain data
    split: str = "train"  # train, or validation


class RolloutWriter:
    """Writes the first `max_samples` samples of each step.

    Args:
        folder: holds one file per step; made when needed.
        max_samples: samples per file.
    """

    def __init__(self, folder: str | Path, *, max_samples: int = 64) -> None:
        self.folder = Path(folder)
        self.max_samples = max_samples

    def write(self, step: int, records: Iterable[RolloutRecord]) -> Path:
        """Writes one step, replacing an earlier file of it; the file appears complete or not at all.

        Records of other steps' files are untouched. At most `max_samples` of each split are kept, in order.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = step_file(self.folder, step)
        temporary = path.with_suffix(".tmp")
        written: dict[str, int] = {}
        with open(temporary, "w", encoding="utf-8") as file:
            for record in records:
                if written.get(record.split, 0) < self.max_samples:
                    written[record.split] = written.get(record.split, 0) + 1
                    file.write(json.dumps(_plain(asdict(record)), ensure_ascii=False) + "\n")
        os.replace(temporary, path)
        return path

    def forget_after(self, step: int) -> int:
        """Removes files of later steps (a run went back to `step`); returns how many."""
        late = [path for number, path in step_files(self.folder).items() if number > step]
        for path in late:
            path.unlink()
        return len(late)


def step_file(folder: str | Path, step: int) -> Path:
    """Where the samples of a step are."""
    return Path(folder) / f"step_{step:06d}.jsonl"


def step_files(folder: str | Path) -> dict[int, Path]:
    """Step -> file, in order; empty when the folder does not exist."""
    found = {}
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_step(folder: str | Path, step: int | None = None) -> Iterator[RolloutRecord]:
    """The samples of a step, in the order written.

    Args:
        folder: the `rollouts` folder, or a run folder that has one.
        step: which one; None is the last.

    Raises:
        DataError: there are no samples, none of that step (says which there are), or a line is not a record.
    """
    folder = Path(folder)
    if (folder / "rollouts").is_dir():
        folder = folder / "rollouts"
    files = step_files(folder)
    if not files:
        raise DataError(f"no rollouts in {folder}: set logging.rollouts_every_steps to 1 or more")
    if step is not None and step not in files:
        steps = list(files)
        raise DataError(f"no rollouts of step {step} in {folder}: there are {len(steps)}, of steps {_ranges(steps)}")
    path = files[step if step is not None else max(files)]
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _record(line, path, number)


def _record(line: str, path: Path, number: int) -> RolloutRecord:
    known = {f.name for f in fields(RolloutRecord)}
    try:
        values = json.loads(line)
        return RolloutRecord(**{key: value for key, value in values.items() if key in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}:{number}: not a rollout record ({error})") from None


def _plain(value: Any) -> Any:
    """JSON for every reader: no NaN or infinity, and text for what JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _ranges(steps: list[int]) -> str:
    """1-3, 7, 9-12"""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return ", ".join(text[:8]) + (", ..." if len(text) > 8 else "")
