"""Weights that trainer and engine hold in common: an update moves no bytes.

The trainer owns one block of memory in the engine's layout (`fused_layout`). Its parameters are views of it, the engine
maps it once and registers its own tensors there. An update is then a message: the version, and an event that the
engine's stream waits for. While the optimizer writes, the engine must not be generating.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.dist.collectives import world_size
from fastrl.dist.fused_layout import EngineTensor, FusedLayout, Rows, fused_layout, sharing_problem
from fastrl.dist.weight_buckets import SharedMemoryReceive, SharedMemorySend
from fastrl.dist.weight_checksum import checksum
from fastrl.dist.weight_cuda import CudaIpcReceive, CudaIpcSend, cuda_ipc_problem
from fastrl.dist.weight_lora import has_adapters
from fastrl.dist.weight_plan import TensorSpec, compare_manifests, dtype_name, torch_dtype
from fastrl.dist.weight_receiver import PROTOCOL, differing
from fastrl.dist.weight_source import ModelSource
from fastrl.dist.weight_sync import Delivery, WeightsDiffer, last_words
from fastrl.dist.weight_wire import Door, Line, LineClosed, connect, remove_abandoned
from fastrl.errors import WeightError

SERVE_S = 0.5  # how often the thread that waits for engines looks whether it is still wanted


def zero_copy_problem(model: nn.Module, *, one_process: bool = False) -> str | None:
    """Why this model's weights cannot be shared in place; None when they can (its device included).

    Args:
        model: the policy.
        one_process: the engine is in this process: nothing has to be mapped by another.
    """
    source = ModelSource(model)
    entries = source.entries()
    sharded = any(hasattr(entry.tensor, "device_mesh") for entry in entries)
    names = [entry.name for entry in entries]
    problem = sharing_problem(names, world_size(), adapters=has_adapters(model), sharded=sharded)
    device = next(model.parameters()).device
    if problem is None and device.type == "cuda" and not one_process:
        problem = cuda_ipc_problem(device)
    if problem is None:
        try:
            fused_layout(source.specs(entries), torch.bfloat16)
        except WeightError as error:
            return str(error)
    return problem


class Refused(WeightError):
    """The engine cannot compute with the shared weights."""


class SharedWeights:
    """The trainer's side: moves the model's parameters into the common memory and announces updates.

    After construction the parameters of `model` have the engine's type and `masters` holds their former values; what
    trains them writes the views from masters of its own (`fastrl.trainer.view_optimizer`).

    Args:
        model: the policy, on one rank; its parameters are replaced in place.
        dtype: the engine's type.
        folder: where the socket's private folder is made; None takes the system's temporary folder.
        timeout_s: longest silence of the engine that is waited for, in seconds.
        one_process: the engine is in this process and takes its tensors by `fit`; there is no socket and no `publish`.

    Raises:
        WeightError: the weights cannot be shared; nothing was changed. Use `WeightSender` then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.bfloat16,
        folder: str | Path | None = None,
        timeout_s: float = 300.0,
        one_process: bool = False,
    ) -> None:
        problem = zero_copy_problem(model, one_process=one_process)
        if problem is not None:
            raise WeightError(f"rollout.zero_copy: {problem}")
        self.model, self.timeout_s = model, timeout_s
        source = ModelSource(model, tied=True)
        entries = source.entries()
        self.layout = fused_layout(source.specs(entries), dtype)
        device = next(model.parameters()).device
        self.memory = None if one_process else allocate(self.layout.num_bytes, device)
        if self.memory is None:
            self.block = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device)
        else:
            self.block = self.memory.slots[0][: self.layout.num_bytes].zero_()
        self.masters: dict[str, Tensor] = {}
        views = self.layout.trainer_views(self.block)
        for entry in entries:
            if entry.same_as is None:
                self.masters[entry.name] = entry.tensor.detach()  # keeps the old memory
                views[entry.name].copy_(entry.tensor.detach())
                entry.tensor.data = views[entry.name]
        self.line: Line | None = None
        self.refusal: str | None = None
        self.engines = 0  # engine processes that have mapped the memory so far
        self.changed, self.closed = threading.Condition(), False
        self.door = None if one_process else Door(folder)
        self.address = self.door.address if self.door else ""
        self.token = self.door.token if self.door else ""
        if self.door is not None:
            # an engine maps its weights while it starts, and again when it was restarted: nobody waits for it here
            threading.Thread(target=self._serve, name="fastrl-shared-weights", daemon=True).start()

    def fit(self, expected: Iterable[TensorSpec]) -> dict[str, Tensor]:
        """The engine's tensors by its own names for an engine in this process, once they are what it expects.

        Raises:
            WeightError: names, shapes or types differ.
        """
        return fitting(self.layout, self.layout.engine_views(self.block), expected)

    def publish(self, version: int, *, verify: bool = False) -> Delivery:
        """Tell the engine that the memory holds the weights of `version`; returns when it has taken note.

        Args:
            version: number of the update, as `policy_version`.
            verify: whether each end sums the memory as it sees it.

        Raises:
            WeightError: the engine is gone, or a parameter has left the memory.
            WeightsDiffer: the engine sees other bytes.
        """
        started = time.monotonic()
        assert self.memory is not None
        try:
            self.check_views()
        except WeightError as error:
            self._withhold(str(error))
            raise
        line = self._wait_for_engine()
        sums = self.checksums() if verify else {}
        self.memory.mark(0)
        try:
            line.send({"kind": "published", "version": version, "verify": verify})
            answer = line.receive(self.timeout_s)
        except LineClosed as error:
            why = last_words(line)
            self._drop(line)
            raise WeightError(f"the engine process ended before version {version}: {why or error}") from error
        if answer["kind"] != "noted":
            raise WeightError(f"the engine could not take version {version}: {answer.get('why', answer['kind'])}")
        if verify and answer["checksums"] != sums:
            raise WeightsDiffer(differing(sums, answer["checksums"]))
        return Delivery(version, 0, time.monotonic() - started, sums, f"zero_copy/{self.memory.kind}")

    def checksums(self) -> dict[str, int]:
        """Checksum of every engine tensor as this process sees it."""
        views = self.layout.engine_views(self.block)
        return checksums_of({tensor.name: views[tensor.name] for tensor in self.layout.tensors})

    def close(self) -> None:
        """Close the line and remove the socket; the memory stays as long as the parameters lie in it."""
        self.closed = True
        if self.line is not None:
            self.line.close()
            self.line = None
        if self.door is not None:
            self.door.close()

    def check_views(self) -> None:
        """Raise WeightError unless the parameters lie in the common memory: `.to()` would part them silently."""
        views = self.layout.trainer_views(self.block)
        for entry in ModelSource(self.model).entries():
            if entry.tensor.data_ptr() != views[entry.name].data_ptr():
                raise WeightError(f"{entry.name} has left the memory shared with the engine: it was replaced or moved")

    def _withhold(self, why: str) -> None:
        """Tell the engine, which waits for the update, that there is none."""
        if self.line is not None:
            with contextlib.suppress(LineClosed):
                self.line.send({"kind": "withheld", "why": why})

    def _wait_for_engine(self) -> Line:
        with self.changed:
            self.changed.wait_for(lambda: self.line is not None or self.refusal is not None, self.timeout_s)
            if self.line is not None:
                return self.line
            why, self.refusal = self.refusal, None
        raise WeightError(why or f"no engine has mapped the shared weights within {self.timeout_s:g} s")

    def _drop(self, line: Line) -> None:
        line.close()
        with self.changed:
            if self.line is line:
                self.line = None

    def _serve(self) -> None:
        """Hand the memory to every engine that connects; the newest one counts."""
        assert self.door is not None
        while not self.closed:
            try:
                line, hello = self.door.accept(SERVE_S)
                self._hand_over(line, hello)
            except (WeightError, OSError) as error:
                if isinstance(error, Refused):
                    with self.changed:
                        self.refusal = str(error)
                        self.changed.notify_all()
                continue  # nobody came, or who came has gone

    def _hand_over(self, line: Line, hello: dict[str, Any]) -> None:
        if hello.get("protocol") != PROTOCOL:
            line.close()
            raise Refused(f"the engine speaks protocol {hello.get('protocol')}, the trainer {PROTOCOL}")
        assert self.memory is not None
        fields, descriptors = self.memory.offer()
        line.send({"kind": "memory", "layout": layout_to_json(self.layout), **fields}, descriptors)
        answer = line.receive(self.timeout_s)
        if answer["kind"] != "opened":
            line.close()
            raise Refused(f"rollout.zero_copy: the engine cannot use the shared weights: {answer.get('why')}")
        self.memory.opened(answer)
        with self.changed:
            self.line, self.refusal = line, None
            self.engines += 1
            self.changed.notify_all()


class SharedWeightsReceiver:
    """The engine's side: its tensors in the trainer's memory.

    Args:
        address: of `SharedWeights`.
        token: of `SharedWeights`.
        timeout_s: longest wait for the memory, in seconds.
    """

    def __init__(self, address: str, token: str, *, timeout_s: float = 300.0) -> None:
        self.address = address
        self.line = connect(address, token, {"kind": "hello", "protocol": PROTOCOL})
        message = self._receive(timeout_s)
        self.layout = layout_from_json(message["layout"])
        self.memory: SharedMemoryReceive | CudaIpcReceive
        if message["transport"] == "cuda_ipc":
            self.memory = CudaIpcReceive(message)
        else:
            descriptors = self.line.receive_descriptors(1, timeout_s)
            self.memory = SharedMemoryReceive(descriptors, int(message["bucket_bytes"]))
        self.tensors = self.layout.engine_views(self.memory.read(0)[: self.layout.num_bytes])

    def accept(self, expected: Iterable[TensorSpec]) -> dict[str, Tensor]:
        """The engine's tensors by its own names, tied names included, once they are what it expects.

        Raises:
            WeightError: names, shapes or types differ; the trainer is told and can fall back to buckets.
        """
        try:
            tensors = fitting(self.layout, self.tensors, expected)
        except WeightError as error:
            self.line.send({"kind": "cannot", "why": str(error)})
            raise
        self.line.send({"kind": "opened", **self.memory.answer()})
        return tensors

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the trainer has published new weights; returns their version. Prefix caches are stale from then on.

        Raises:
            WeightError: the trainer is gone, or has found that its weights are no longer in the common memory.
        """
        message = self._receive(timeout_s)
        if message["kind"] != "published":
            raise WeightError(message["why"])
        self.memory.read(0)
        sums = checksums_of(self.engine_tensors()) if message["verify"] else {}
        self.memory.release(0)
        self.line.send({"kind": "noted", "checksums": sums})
        return int(message["version"])

    def engine_tensors(self) -> dict[str, Tensor]:
        """The tensors without tied names."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.layout.aliases}

    def close(self) -> None:
        """Close the line and unmap the memory."""
        self.line.close()
        self.memory.close()

    def _receive(self, timeout_s: float | None) -> dict[str, Any]:
        try:
            return self.line.receive(timeout_s)
        except LineClosed:
            remove_abandoned(self.address)
            raise


def fitting(
    layout: FusedLayout, tensors: dict[str, Tensor], expected: Iterable[TensorSpec]
) -> dict[str, Tensor]:
    """`tensors`, once the layout is what the engine expects; tied names count once. Raises WeightError."""
    problem = compare_manifests(layout.engine_specs(), [s for s in expected if s.name not in layout.aliases])
    if problem is not None:
        raise WeightError(problem)
    return tensors


def allocate(size: int, device: torch.device) -> SharedMemorySend | CudaIpcSend:
    """Memory that another process can map: of the GPU, or shared memory."""
    if device.type == "cuda":
        return CudaIpcSend(size, device, num_slots=1)
    return SharedMemorySend(size, num_slots=1)


def checksums_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Checksum of each tensor's bytes."""
    return {name: checksum(tensor.reshape(-1).view(torch.uint8)) for name, tensor in tensors.items()}


def layout_to_json(layout: FusedLayout) -> dict[str, Any]:
    """As it goes over the line; the trainer's rows stay at home."""
    return {
        "tensors": [[tensor.name, list(tensor.shape), tensor.offset] for tensor in layout.tensors],
        "aliases": layout.aliases,
        "dtype": dtype_name(layout.dtype),
        "num_bytes": layout.num_bytes,
    }


def layout_from_json(fields: dict[str, Any]) -> FusedLayout:
    """The inverse of `layout_to_json`."""
    rows: tuple[Rows, ...] = ()
    tensors = tuple(EngineTensor(name, tuple(shape), int(offset), rows) for name, shape, offset in fields["tensors"])
    return FusedLayout(tensors, dict(fields["aliases"]), torch_dtype(fields["dtype"]), int(fields["num_bytes"]))
