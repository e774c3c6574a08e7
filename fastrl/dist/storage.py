"""The files of a checkpoint: tensors through torch.distributed.checkpoint, JSON beside them, a checksum of each."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fastrl.dist.collectives import all_gather_object, current_group, on_rank_zero, rank, world_size
from fastrl.dist.tree import memory_of
from fastrl.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST, STATE, TREE, TENSORS = "manifest.json", "state.json", "tree.json", "tensors"
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "a disk quota is used up",
    errno.EFBIG: "a file would be larger than this process or file system allows",
}
FILE_SIZE_ACTION = "Raise the file size limit (ulimit -f), or set run.dir to another file system"

# What a .metadata file may name; everything else in it is refused instead of being imported.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in [
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ]
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath", "Path"):
            return Path
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise CheckpointError(f"refused: its index names {module}.{name}, which no checkpoint of fastrl contains")


class _Reader(FileSystemReader):
    """Reads the pickled index with an unpickler that knows only the classes of an index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def write_tensors(folder: Path, table: dict[str, Tensor]) -> None:
    """Writes the table (plain tensors or DTensors; all ranks together) to `folder`, synced to disk."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torch.distributed is uninitialized": that is what no_dist says
        dcp.save(table, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=world_size() == 1, process_group=current_group())


def copied(tree: Any) -> Any:
    """A nested state with every tensor copied to the CPU, shards as shards; tied tensors stay tied."""
    done: dict[Any, Tensor] = {}

    def copy(node: Any) -> Any:
        if isinstance(node, Tensor):
            memory = memory_of(node)
            if memory not in done:
                done[memory] = _cpu_copy(node)
            return done[memory]
        if isinstance(node, dict):
            return {key: copy(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(copy(value) for value in node)
        return node

    return copy(tree)


def _cpu_copy(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach().to("cpu", copy=True)
        return DTensor(local, tensor._spec, requires_grad=False)  # from_local would move it back to the mesh's device
    return tensor.detach().to("cpu", copy=True)


def read_index(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of each stored tensor."""
    found = _Reader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(folder: Path, table: dict[str, Tensor]) -> None:
    """Fills the tensors of `table` in place, resharding where they are DTensors of another layout."""
    if not table and world_size() == 1:
        return
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(table, storage_reader=_Reader(folder), planner=planner, no_dist=world_size() == 1, process_group=current_group())


def local_bytes(table: dict[str, Tensor]) -> int:
    """Bytes that this rank writes: its shards, and on rank 0 what is not sharded."""
    total = 0
    for tensor in table.values():
        if hasattr(tensor, "to_local"):
            local = tensor.to_local()
            total += local.numel() * local.element_size()
        elif rank() == 0:
            total += tensor.numel() * tensor.element_size()
    return total


def write_json(path: Path, value: Any) -> None:
    """Writes JSON and syncs it to disk; floats come back bit for bit."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes creations and renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(path: Path) -> dict[str, Any]:
    """{"bytes": size, "sha256": hex digest} of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Fingerprints every file of `folder` (each rank the files it wrote) and writes the manifest on rank 0."""
    mine = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        owner = int(path.name[2:].split("_")[0]) if path.name.startswith("__") else 0
        if owner == rank():
            mine[path.relative_to(folder).as_posix()] = fingerprint(path)
    files = {name: entry for part in all_gather_object(mine) for name, entry in part.items()}
    manifest = {"format": FORMAT_VERSION, **entries, "files": dict(sorted(files.items()))}
    on_rank_zero(lambda: write_json(folder / MANIFEST, {**manifest, "sha256": _digest(manifest)}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; raises CheckpointError when it is missing, damaged or of a newer format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        digest = manifest.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from None
    if digest != _digest(manifest):
        raise CheckpointError(f"{path} is damaged: its own checksum does not fit")
    if manifest["format"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest['format']}; this fastrl reads up to {FORMAT_VERSION}: "
            "upgrade fastrl"
        )
    return manifest


def damaged_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What is wrong with the files of a checkpoint, one phrase each; the ranks share the reading."""
    problems = []
    for i, (name, expected) in enumerate(manifest["files"].items()):
        if i % world_size() == rank():
            problems += _compare(folder / name, name, expected)
    return [problem for part in all_gather_object(problems) for problem in part]


def no_room(error: BaseException) -> int | None:
    """The errno (of NO_ROOM) when a full disk, a quota or a file size limit is at the root of `error`."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and current.errno in NO_ROOM:
            return current.errno
        if isinstance(current, dcp.CheckpointException):
            waiting += [failure[0] for failure in current.failures.values()]
        waiting += [current.__cause__, current.__context__]
    return None


def _compare(path: Path, name: str, expected: dict[str, Any]) -> list[str]:
    if not path.is_file():
        return [f"{name} is missing"]
    size = path.stat().st_size
    if size != expected["bytes"]:
        return [f"{name} has {size} bytes instead of {expected['bytes']}"]
    if fingerprint(path)["sha256"] != expected["sha256"]:
        return [f"{name} has changed (checksum)"]
    return []


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
