"""The few collectives the trainer needs; each is the identity when no process group is initialised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

Tensors = TypeVar("Tensors", dict[str, Tensor], list[Tensor])
Result = TypeVar("Result")


def is_distributed() -> bool:
    """True when a process group exists (it may still have a single rank)."""
    return torch_dist.is_available() and torch_dist.is_initialized()


_own = threading.local()  # `.group`: what this thread's collectives use instead of the default group


@contextmanager
def using_group(group: torch_dist.ProcessGroup | None) -> Iterator[None]:
    """Collectives of this thread go through `group` inside, so that they cannot meet those of another thread."""
    before, _own.group = current_group(), group
    try:
        yield
    finally:
        _own.group = before


def current_group() -> torch_dist.ProcessGroup | None:
    """The group of this thread's collectives; None is the default group."""
    return getattr(_own, "group", None)


def rank() -> int:
    """Number of this process, 0 without a process group."""
    return torch_dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return torch_dist.get_world_size() if is_distributed() else 1


def barrier() -> None:
    """Returns when every rank has called it."""
    if is_distributed():
        torch_dist.barrier(group=current_group())


def communication_device() -> torch.device:
    """The device on which the default group can reduce: the current GPU under NCCL, the CPU under gloo."""
    if is_distributed() and "nccl" in str(torch_dist.get_backend(current_group())):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_data_group: list[Any] = [None]


def data_group() -> Any:
    """The process group over which statistics of the training batch are taken; None is all ranks.

    Under sequence parallelism several ranks hold the same sequences: the group then has one of each.
    """
    return _data_group[0]


def set_data_group(group: Any) -> None:
    """Choose what `data_group` returns; the same kind of group on every rank."""
    _data_group[0] = group


def all_reduce_sum(tensors: Tensors, group: Any = None) -> Tensors:
    """Sums every tensor over all ranks, or those of `group`, with one collective for all of them.

    Args:
        tensors: dict or list of tensors of any shape and real dtype (integers exact below 2^53); the same names (or
            number) and shapes on every rank. They travel as one float64 vector.

    Returns:
        a new dict or list of the same layout; each tensor keeps its dtype and device. The arguments are not changed.
    """
    if not is_distributed():
        return tensors
    items = list(tensors.values()) if isinstance(tensors, dict) else tensors
    if not items:
        return tensors
    device, group = communication_device(), group or current_group()
    packed = torch.cat([t.detach().reshape(-1).to(device=device, dtype=torch.float64) for t in items])
    torch_dist.all_reduce(packed, group=group)
    parts = packed.split([t.numel() for t in items])
    summed = [part.view(t.shape).to(device=t.device, dtype=t.dtype) for part, t in zip(parts, items)]
    return dict(zip(tensors, summed)) if isinstance(tensors, dict) else summed


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Sums the gradients of whole (not sharded) parameters over all ranks, in place, a few collectives for all.

    A rank without a gradient contributes zeros, so each rank may have seen other tokens, or none. Sharded parameters are
    left out: their gradients are summed by the backward pass.
    """
    if world_size() == 1:
        return
    whole = [p for p in parameters if not hasattr(p, "to_local")]
    for dtype in sorted({p.dtype for p in whole}, key=str):
        bucket: list[Tensor] = []
        for p in [p for p in whole if p.dtype == dtype]:
            bucket.append(p)
            if sum(b.numel() for b in bucket) >= _BUCKET_NUMBERS:
                _sum_bucket(bucket)
                bucket = []
        if bucket:
            _sum_bucket(bucket)


_BUCKET_NUMBERS = 1 << 25  # 128 MiB in float32


def _sum_bucket(parameters: Sequence[Tensor]) -> None:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.reshape(-1) for g in grads])
    torch_dist.all_reduce(flat, group=current_group())
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)


def all_reduce_max(values: list[int]) -> list[int]:
    """The largest of each number over all ranks; as many numbers on every rank."""
    if not is_distributed() or world_size() == 1 or not values:
        return values
    most = torch.tensor(values, dtype=torch.int64, device=communication_device())
    torch_dist.all_reduce(most, op=torch_dist.ReduceOp.MAX)
    return [int(v) for v in most.tolist()]


def all_gather_rows(tensor: Tensor, group: Any = None) -> Tensor:
    """Concatenates the rows of all ranks, or those of `group`, in rank order; ranks may hold different numbers of rows, also none.

    Args:
        tensor: [n_r, ...], any dtype; the trailing shape is the same on every rank.

    Returns:
        [sum of n_r, ...], same dtype and device, equal on every rank.
    """
    if not is_distributed() or world_size() == 1:
        return tensor
    device, group = communication_device(), group or current_group()
    counts = torch.zeros(torch_dist.get_world_size(group), dtype=torch.int64, device=device)
    counts[torch_dist.get_rank(group)] = tensor.shape[0]
    torch_dist.all_reduce(counts, group=group)
    num_rows = counts.tolist()
    local = tensor.detach().to(device).contiguous()
    wire = local.view(torch.uint8) if local.dtype == torch.bool else local
    padded = wire.new_zeros((max(num_rows), *wire.shape[1:]))
    padded[: wire.shape[0]] = wire
    gathered = [torch.empty_like(padded) for _ in num_rows]
    torch_dist.all_gather(gathered, padded, group=group)
    rows = torch.cat([block[:n] for block, n in zip(gathered, num_rows)])
    return rows.view(tensor.dtype).to(tensor.device) if local.dtype == torch.bool else rows.to(tensor.device)


def any_rank(flag: bool) -> bool:
    """True on every rank when `flag` is true on at least one."""
    if not is_distributed():
        return bool(flag)
    total = torch.tensor([float(bool(flag))], device=communication_device())
    torch_dist.all_reduce(total, group=current_group())
    return bool(total.item() > 0)


def all_gather_object(value: Any) -> list[Any]:
    """The value of every rank, in rank order; for small host-side objects outside the step's hot path."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(values, value, group=current_group())
    return values


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on rank 0; an empty list on the others. For small host-side objects."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size() if rank() == 0 else []
    torch_dist.gather_object(value, values or None, group=current_group())
    return values


def broadcast_object(value: Any, source: int = 0) -> Any:
    """The value that rank `source` passed, on every rank."""
    if not is_distributed():
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, src=source, group=current_group())
    return box[0]


def on_rank_zero(function: Callable[[], Result]) -> Result:
    """Calls `function` on rank 0 only; every rank returns its result or raises its exception."""
    if not is_distributed():
        return function()
    outcome: Any = None
    if rank() == 0:
        try:
            outcome = (function(), None)
        except Exception as error:  # raised again below, on every rank
            outcome = (None, error)
    result, raised = broadcast_object(outcome)
    if raised is not None:
        raise raised
    return result
