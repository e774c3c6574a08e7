"""Checkpoints that are there or not: written beside, synced, checked, then renamed into place.

    manager = CheckpointManager("runs/a/checkpoints", keep_last=2)
    manager.save(42, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, {"step": 42})
    tensors, state = manager.load("auto", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

A process killed at any moment leaves the previous checkpoint loadable. Every rank calls every method.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.dist import storage
from fastrl.dist.collectives import (
    all_gather_object,
    barrier,
    is_distributed,
    on_rank_zero,
    rank,
    using_group,
    world_size,
)
from fastrl.dist.tree import check_json, flatten, join, lookup, rebuild, tensor_leaves
from fastrl.errors import CheckpointError

_NAME = re.compile(r"step_(\d+)(_\d+)?")
_TEMPORARY, _TRASH = ".tmp-", ".trash-"
Loaded = tuple[dict[str, Any], dict[str, Any]]  # (tensors, state)
_MARGIN_BYTES = 1 << 20  # room for JSON, the index and file system blocks


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk. `serial` counts saves of the run, so that the newest is known even after going back."""

    path: Path
    step: int
    serial: int
    score: float | None
    saved_at: str  # ISO 8601, UTC
    num_bytes: int


class CheckpointManager:
    """Saves, lists, prunes and loads the checkpoints of one run.

    Args:
        folder: holds `step_000042/` folders; made at the first save.
        keep_last: how many of the newest stay.
        keep_best: how many of those with the highest score stay besides (True is 1).
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 2, keep_best: int | bool = 0) -> None:
        self.folder = Path(folder)
        self.keep_last = max(int(keep_last), 1)
        self.keep_best = int(keep_best)
        self._group: torch.distributed.ProcessGroup | None = None  # of the thread that writes
        self._writer: _Writer | None = None

    def save_later(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], *, score: float | None = None
    ) -> None:
        """Like `save`, but only copies the tensors to the CPU before it returns; a thread writes them.

        One save is on its way at a time: the next one, and `finish`, wait for it and raise what it raised.
        """
        self.finish()
        if self._group is None and is_distributed():
            self._group = torch.distributed.new_group(backend="gloo")  # apart from the training's collectives
        copies = storage.copied(tensors)
        self._writer = _Writer(self._group, lambda: self.save(step, copies, state, score=score))
        self._writer.start()

    def finish(self) -> None:
        """Wait for a save that is on its way; raises what it raised."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.join()
            if writer.error is not None:
                raise writer.error

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any], *, score: float | None = None) -> Path:
        """Writes one checkpoint and removes those that need not stay.

        Args:
            step: training steps done.
            tensors: nested state dicts ("model", "critic", "optimizer", ...); tensors or DTensors and plain values.
            state: everything else, JSON-able (numbers, strings, lists, dicts with str keys).
            score: what `keep_best` compares; higher is better.

        Returns:
            the checkpoint's folder.

        Raises:
            CheckpointError: there is no room (why, path, bytes needed and free) or a value cannot be saved. Nothing of the
                attempt stays, earlier checkpoints are untouched.
        """
        check_json(state)
        table, tree = flatten(tensors)
        self.clean()
        name = on_rank_zero(lambda: self._new_name(step))
        temporary = self.folder / f"{_TEMPORARY}{name}"
        needed = sum(all_gather_object(storage.local_bytes(table))) + _MARGIN_BYTES
        self._check_space(needed)
        entries = self._entries(step, score)
        try:
            self._write(temporary, table, tree, state, entries)
            on_rank_zero(lambda: self._publish(temporary, self.folder / name))
        except BaseException as error:
            if rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            if (reason := storage.no_room(error)) is not None:
                raise self._no_room(needed, reason) from error
            if isinstance(error, Exception) and not isinstance(error, CheckpointError):
                raise CheckpointError(f"could not save {self.folder / name}: {_first_cause(error)}") from error
            raise
        self._prune(self.folder / name)
        return self.folder / name

    def load(self, path: str | Path = "auto", templates: dict[str, Any] | None = None) -> Loaded:
        """Loads one checkpoint after checking every file of it.

        Args:
            path: a checkpoint, a run folder, or "auto" for the newest of this manager's folder.
            templates: as given to `load_checkpoint`.
        """
        return load_checkpoint(self.folder if str(path) == "auto" else path, templates)

    def list(self) -> Sequence[Checkpoint]:
        """All checkpoints, oldest save first; half-written and damaged folders are not among them."""
        return list_checkpoints(self.folder)

    def latest(self) -> Checkpoint | None:
        """The checkpoint saved last, or None."""
        found = self.list()
        return found[-1] if found else None

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest score (the earliest of equals), or None."""
        scored = [c for c in self.list() if c.score is not None]
        return max(scored, key=lambda c: (c.score, -c.serial)) if scored else None

    def clean(self) -> Sequence[str]:
        """Removes what killed saves and removals left behind; returns the names. Only the writing run may call it."""
        removed = []
        if rank() == 0 and self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                if path.name.startswith((_TEMPORARY, _TRASH)):
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path.name)
        barrier()
        return removed

    def _write(
        self, temporary: Path, table: dict[str, Tensor], tree: Any, state: dict[str, Any], entries: dict[str, Any]
    ) -> None:
        tensors = temporary / storage.TENSORS

        def begin() -> None:
            tensors.mkdir(parents=True)
            storage.write_json(temporary / storage.STATE, state)
            storage.write_json(temporary / storage.TREE, tree)

        on_rank_zero(begin)
        storage.write_tensors(tensors, table)
        storage.write_manifest(temporary, entries)

    def _publish(self, temporary: Path, final: Path) -> None:
        storage.sync_folder(temporary / storage.TENSORS)
        storage.sync_folder(temporary)
        temporary.rename(final)
        storage.sync_folder(self.folder)

    def _entries(self, step: int, score: float | None) -> dict[str, Any]:
        return {
            "step": int(step),
            "serial": 1 + max((c.serial for c in self.list()), default=0),
            "score": None if score is None or not math.isfinite(score) else float(score),
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "world_size": world_size(),
            "torch": torch.__version__,
        }

    def _new_name(self, step: int) -> str:
        """step_000042; after going back in time the older one of the same step stays until the new one is complete."""
        name, again = f"step_{step:06d}", 1
        while (self.folder / name).exists():
            again += 1
            name = f"step_{step:06d}_{again}"
        return name

    def _check_space(self, needed: int) -> None:
        def measure() -> bool:
            self.folder.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self.folder).free < needed

        if on_rank_zero(measure):
            raise self._no_room(needed, errno.ENOSPC)

    def _no_room(self, needed: int, reason: int) -> CheckpointError:
        free, last = shutil.disk_usage(self.folder).free, self.latest()
        action = "Free some space, lower run.keep_last_checkpoints, or set run.dir to another disk"
        if reason == errno.EFBIG:
            action = f"{storage.FILE_SIZE_ACTION}, or use more ranks, which each write a file of their own"
        return CheckpointError(
            f"no room for a checkpoint in {self.folder}: {storage.NO_ROOM[reason]}; it needs {needed} bytes "
            f"({needed / 2**30:.2f} GiB), {free} bytes ({free / 2**30:.2f} GiB) are free"
            + (f"; {last.path} is intact" if last else "; there is no earlier checkpoint")
            + f". {action}"
        )

    def _prune(self, newest: Path) -> None:
        if rank() == 0:
            found = self.list()
            latest_of_step = {c.step: c for c in found}
            candidates = list(latest_of_step.values())
            candidates.sort(key=lambda c: c.serial)
            scored = sorted((-c.score, c.serial, c.path) for c in candidates if c.score is not None)
            keep = {newest, *(c.path for c in candidates[-self.keep_last :])}
            keep |= {path for _, _, path in scored[: self.keep_best]}
            for checkpoint in found:
                if checkpoint.path not in keep:
                    # Renamed first: a kill in the middle must not leave half a checkpoint that looks whole.
                    trash = self.folder / f"{_TRASH}{checkpoint.path.name}"
                    checkpoint.path.rename(trash)
                    shutil.rmtree(trash, ignore_errors=True)
        barrier()


class _Writer(threading.Thread):
    """Writes one checkpoint beside the training, with collectives of its own."""

    def __init__(self, group: torch.distributed.ProcessGroup | None, write: Callable[[], object]) -> None:
        super().__init__(name="fastrl-checkpoint", daemon=True)
        self.group, self.write = group, write
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with using_group(self.group):
                self.write()
        except BaseException as error:  # raised again by `finish`
            self.error = error


def list_checkpoints(folder: str | Path) -> list[Checkpoint]:
    """The checkpoints in a folder, oldest save first; those without a readable manifest are left out."""
    found = []
    for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []:
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(CheckpointError):
                manifest = storage.read_manifest(path)
                size = sum(entry["bytes"] for entry in manifest["files"].values())
                fields = {key: manifest[key] for key in ("step", "serial", "score", "saved_at")}
                found.append(Checkpoint(path=path, num_bytes=size, **fields))
    return sorted(found, key=lambda c: c.serial)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder meant by `path`: itself, or the newest one of a run folder or of its `checkpoints/`.

    Raises:
        CheckpointError: there is none; names what was looked at.
    """
    path = Path(path)
    if (path / storage.MANIFEST).is_file() or _NAME.fullmatch(path.name):
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}{_offer(path.parent, path)}")
        return path
    for folder in (path, path / "checkpoints"):
        # The newest by name where no manifest is readable, so that loading says what is wrong with it.
        found = [c.path for c in list_checkpoints(folder)] or _step_folders(folder)
        if found:
            return found[-1]
    raise CheckpointError(f"there is no checkpoint in {path}")


def load_checkpoint(path: str | Path, templates: dict[str, Any] | None = None) -> Loaded:
    """Loads a checkpoint after checking size and checksum of every file.

    Tensors are loaded in place into those of `templates` at the same keys (DTensors of any layout are resharded). Where
    the template has an empty dict (the state of a fresh optimizer), tensors are made on the CPU. Only the top-level
    entries of `templates` are loaded; without templates all are, on the CPU.

    Args:
        path: a checkpoint folder, or a run folder (its newest checkpoint).
        templates: nested state dicts of the objects to restore.

    Returns:
        (tensors, state) as they were given to `save`, tensors being those of the templates where there are some.

    Raises:
        CheckpointError: missing or damaged files (named, with the previous checkpoint to use), a newer format, or a
            checkpoint of another model (the tensor and both shapes are named). Templates are untouched then.
    """
    folder = find_checkpoint(path)
    manifest = _offering(folder, lambda: storage.read_manifest(folder))
    problems = storage.damaged_files(folder, manifest)
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}{_offer(folder.parent, folder)}")
    state = json.loads((folder / storage.STATE).read_text(encoding="utf-8"))
    tree = json.loads((folder / storage.TREE).read_text(encoding="utf-8"))
    if templates is not None:
        tree = {"dict": [entry for entry in tree["dict"] if entry[0] in templates]}
        missing = [key for key in templates if key not in [entry[0] for entry in tree["dict"]]]
        if missing:
            raise CheckpointError(
                f"{folder} holds no {', '.join(map(str, missing))}: it was saved by another kind of run"
            )
    leaves = _restore(folder, tree, templates)
    return rebuild(tree, leaves), state


def _restore(folder: Path, tree: dict[str, Any], templates: dict[str, Any] | None) -> dict[Any, Tensor]:
    """The tensor of each leaf, filled from the files."""
    index = storage.read_index(folder / storage.TENSORS)
    table: dict[str, Tensor] = {}
    leaves: dict[Any, Tensor] = {}
    problems = []
    for path, name in tensor_leaves(tree):
        entry = index[name]
        target = lookup(templates, path) if templates is not None else None
        if target is None and templates is not None and not _may_be_made(templates, path):
            problems.append(f"{join(path)} is in the checkpoint but not in this run")
            continue
        if target is None:
            target = torch.empty(entry.size, dtype=entry.properties.dtype)
        if tuple(target.shape) != tuple(entry.size) or target.dtype != entry.properties.dtype:
            problems.append(
                f"{join(path)} is {list(entry.size)} {_short(entry.properties.dtype)} in the checkpoint "
                f"and {list(target.shape)} {_short(target.dtype)} in this run"
            )
            continue
        leaves[path] = target
        table.setdefault(name, target)
    stored = {path for path, _ in tensor_leaves(tree)}
    _, wanted = flatten(templates if templates is not None else {})
    problems += [f"{join(path)} is not in the checkpoint" for path, _ in tensor_leaves(wanted) if path not in stored]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{folder} belongs to another model: {shown}")
    with torch.no_grad():
        storage.read_tensors(folder / storage.TENSORS, table)
        for path, name in tensor_leaves(tree):
            if leaves[path] is not table[name]:  # tied when saved, separate here
                leaves[path].copy_(table[name])
    return leaves


def _may_be_made(templates: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """True when the nearest template above `path` is an empty dict: its owner fills it later."""
    for length in range(len(path) - 1, 0, -1):
        node = lookup(templates, path[:length])
        if node is not None:
            return node == {} if isinstance(node, dict) else False
    return False


def _offering(folder: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_offer(folder.parent, folder)}") from None


def _offer(parent: Path, bad: Path) -> str:
    others = [c for c in list_checkpoints(parent) if c.path != bad]
    return f". The one saved before it is {others[-1].path}: resume from that one" if others else ""


def _step_folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name)) if folder.is_dir() else []


def _first_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    for failure in failures.values():
        return f"{type(failure[0]).__name__}: {failure[0]}"
    return f"{type(error).__name__}: {error}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
