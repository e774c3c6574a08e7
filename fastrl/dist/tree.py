"""Nested state dicts as a flat table of tensors plus a JSON skeleton, and back, with every Python type kept."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fastrl.errors import CheckpointError

Path = tuple[Any, ...]


def flatten(tree: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Splits nested dicts, lists and tuples into tensors by name and a skeleton that JSON can hold.

    Two leaves that are the same memory (tied weights) share one entry of the table.

    Args:
        tree: dicts with str or int keys, lists, tuples; leaves are tensors, bool, int, float, str or None.

    Returns:
        (table, skeleton): table maps "model/layers.0.weight" to its tensor; skeleton refers to these names.

    Raises:
        CheckpointError: names the key that holds something else.
    """
    table: dict[str, Tensor] = {}
    seen: dict[Any, str] = {}

    def walk(node: Any, path: Path) -> dict[str, Any]:
        if isinstance(node, Tensor):
            name = join(path)
            memory = memory_of(node)
            if memory in seen:
                return {"tensor": seen[memory]}
            if name in table:
                raise CheckpointError(f"two entries of the state are both called {name}")
            table[name] = node
            seen[memory] = name
            return {"tensor": name}
        if isinstance(node, dict):
            for key in node:
                if type(key) not in (str, int):
                    raise CheckpointError(f"state {join(path)} has a key {key!r}: keys are str or int")
            return {"dict": [[key, walk(value, (*path, key))] for key, value in node.items()]}
        if type(node) in (list, tuple):
            kind = "list" if isinstance(node, list) else "tuple"
            return {kind: [walk(value, (*path, i)) for i, value in enumerate(node)]}
        if node is None or type(node) in (bool, int, float, str):
            return {"value": node}
        raise CheckpointError(
            f"state {join(path)} is a {type(node).__name__}: only tensors and plain values can be saved"
        )

    return table, walk(tree, ())


def join(path: Path) -> str:
    """The name of a leaf: its keys joined by `/`."""
    return "/".join(str(key) for key in path)


def tensor_leaves(skeleton: dict[str, Any], path: Path = ()) -> list[tuple[Path, str]]:
    """(key path, name in the table) of each tensor leaf of a skeleton."""
    if "tensor" in skeleton:
        return [(path, skeleton["tensor"])]
    found: list[tuple[Path, str]] = []
    for key, child in _children(skeleton):
        found += tensor_leaves(child, (*path, key))
    return found


def rebuild(skeleton: dict[str, Any], leaves: dict[Path, Tensor], path: Path = ()) -> Any:
    """The nested state of a skeleton, with the tensors of `leaves` by key path; leaves that are missing become None."""
    if "tensor" in skeleton:
        return leaves.get(path)
    if "value" in skeleton:
        return skeleton["value"]
    children = [(key, rebuild(child, leaves, (*path, key))) for key, child in _children(skeleton)]
    if "dict" in skeleton:
        return dict(children)
    values = [value for _, value in children]
    return values if "list" in skeleton else tuple(values)


def lookup(tree: Any, path: Path) -> Any:
    """The node at `path`, or None when some key of it is missing."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def check_json(value: Any, name: str = "state") -> None:
    """Raises CheckpointError, naming the key, when JSON cannot hold `value` (tuples come back as lists)."""
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{name} has the key {key!r}: keys of the saved state are str")
            check_json(child, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            check_json(child, f"{name}[{i}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"{name} is a {type(value).__name__}: tensors go under `tensors`, the rest is plain values"
        )


def _children(skeleton: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    if "dict" in skeleton:
        return [(key, child) for key, child in skeleton["dict"]]
    return list(enumerate(skeleton.get("list", skeleton.get("tuple", []))))


def memory_of(tensor: Tensor) -> Any:
    """Equal for two tensors exactly when they are the same view of the same storage."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if math.prod(tensor.shape) == 0:
        return object()
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), tuple(local.shape), tuple(local.stride()), tuple(tensor.shape), local.dtype
