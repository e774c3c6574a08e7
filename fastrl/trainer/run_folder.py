"""Where a run lives: `runs/<name>/{config.yaml,metrics.jsonl,rollouts/,checkpoints/,log.txt}`, one folder per run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fastrl.config.schema import Config
from fastrl.errors import CheckpointError, ConfigError


def new_run_folder(config: Config, files: tuple[str, ...]) -> Path:
    """A fresh folder for this run; a name that is taken by a run with checkpoints or metrics is refused."""
    if config.run.name is not None:
        folder = Path(config.run.dir) / config.run.name
        if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists():
            raise ConfigError(
                f"run.name = {config.run.name}: {folder} already holds a run; add --resume to continue it, "
                "or choose another run.name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = Path(files[-1]).stem if files else "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        folder = Path(config.run.dir) / (f"{stem}-{stamp}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise ConfigError(f"run.dir = {config.run.dir}: cannot make a new run folder there")


def resumed_run_folder(config: Config, files: tuple[str, ...], resume: str) -> tuple[Path, Path | None]:
    """The folder to continue in and the checkpoint to start from (None: the newest of the folder).

    `auto` takes run.name if set, else the newest folder in run.dir made from the same configuration file that has a
    checkpoint; a path may be a run folder or one of its checkpoints.
    """
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise CheckpointError(f"--resume {resume}: no such folder")
        if (path / "checkpoints").is_dir():
            return path, None
        return (
            (path.parent.parent, path) if path.parent.name == "checkpoints" else (new_run_folder(config, files), path)
        )
    root = Path(config.run.dir)
    if config.run.name is not None:
        candidates = [root / config.run.name]
    else:
        stem = Path(files[-1]).stem if files else "run"
        candidates = sorted(root.glob(f"{stem}-[0-9]*"), key=os.path.getmtime, reverse=True) if root.is_dir() else []
    for folder in candidates:
        if any((folder / "checkpoints").glob("step_*")):
            return folder, None
    where = root / config.run.name if config.run.name else root
    raise CheckpointError(
        f"--resume auto: no checkpoint under {where}; start without --resume, or name a run with --resume PATH"
    )
