"""Where a run lives: `runs/<name>/{config.yaml,metrics.jsonl,rollouts/,checkpoints/,log.txt}`, one folder per run."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastrl.config.schema import Config
from fastrl.config.yaml_source import read_document
from fastrl.dist.checkpoint import list_checkpoints
from fastrl.dist.collectives import on_rank_zero, rank
from fastrl.dist.storage import FILE_SIZE_ACTION
from fastrl.errors import CheckpointError, ConfigError, FastRLError, TrainingError

NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


def new_run_folder(config: Config, files: tuple[str, ...]) -> Path:
    """A fresh folder for this run; one that holds anything is refused, so that nobody's files are written over."""
    try:
        return _new_run_folder(config, files)
    except OSError as error:
        raise ConfigError(f"run.dir = {config.run.dir}: cannot make {error.filename} ({error.strerror})") from error


def _new_run_folder(config: Config, files: tuple[str, ...]) -> Path:
    if config.run.name is not None:
        folder = Path(config.run.dir) / config.run.name
        folder.mkdir(parents=True, exist_ok=True)
        if has_checkpoint(folder):
            raise ConfigError(
                f"run.name = {config.run.name}: {folder} already holds a run; add --resume to continue it, "
                "or choose another run.name"
            )
        if any(folder.iterdir()):
            what = "a run that saved no checkpoint" if (folder / "metrics.jsonl").exists() else "files"
            raise ConfigError(
                f"run.name = {config.run.name}: {folder} already holds {what}; remove the folder, or choose another "
                "run.name"
            )
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
        if has_checkpoint(folder):
            return folder, None
    where = root / config.run.name if config.run.name else root
    begun = config.run.name is not None and where.is_dir() and any(where.iterdir())
    first = "the run there saved none (run.checkpoint_every_steps): remove the folder and " if begun else ""
    raise CheckpointError(
        f"--resume auto: no checkpoint under {where}; {first}start without --resume, or name a run with --resume PATH"
    )


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds anything that looks like a checkpoint."""
    return any((folder / "checkpoints").glob("step_*"))


def unreadable_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run folder without a readable manifest: what "the newest" passes over."""
    readable = {checkpoint.path for checkpoint in list_checkpoints(folder / "checkpoints")}
    return [path for path in sorted((folder / "checkpoints").glob("step_*")) if path not in readable]


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Keeps a second run out of a folder for as long as this one writes in it; all ranks together are one."""
    handle = on_rank_zero(lambda: _lock(folder))
    try:
        yield
    finally:
        if rank() == 0 and handle is not None:
            os.close(handle)


def _lock(folder: Path) -> int | None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"{folder} is in use by another process that trains in it: wait until it ends, or choose another run.name"
        ) from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def changed_keys(file: Path, config: Config) -> list[str]:
    """What a resumed run does otherwise than at its last start (`file` is its config.yaml): `optim.lr = 1 -> 2`."""
    before = read_document(str(file)).data if file.is_file() else {}
    changes = []
    for section, keys in config.model_dump(mode="json").items():
        old: Any = before.get(section)
        if isinstance(old, dict):
            changed = [key for key, value in keys.items() if key in old and old[key] != value]
            changes += [f"{section}.{key} = {old[key]} -> {keys[key]}" for key in changed]
    return changes


@contextmanager
def leaving_nothing(folder: Path, *, fresh: bool) -> Iterator[None]:
    """Removes the folder of a new run that was stopped, or ended with a deliberate error, before its first figures."""
    try:
        yield
    except (FastRLError, KeyboardInterrupt):
        empty = (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size == 0
        if fresh and rank() == 0 and empty:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Says what is in the way where the disk under the run folder is full or read-only, or its files may not grow."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        action = "make room or set run.dir to another disk"
        if error.errno == errno.EFBIG:
            action = FILE_SIZE_ACTION[:1].lower() + FILE_SIZE_ACTION[1:]
        raise TrainingError(
            f"cannot write {error.filename or f'in {folder}'}: {error.strerror}. Checkpoints that are there are "
            f"intact; {action}, then go on with --resume"
        ) from error
