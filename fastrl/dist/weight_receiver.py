"""The engine's side of a weight delivery."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastrl.dist.weight_buckets import NUM_SLOTS, ReceiveBuckets, SharedMemoryReceive
from fastrl.dist.weight_checksum import partial_checksum
from fastrl.dist.weight_cuda import CudaIpcReceive
from fastrl.dist.weight_plan import TensorSpec, compare_manifests, names_by_tensor
from fastrl.dist.weight_timeline import Timeline
from fastrl.dist.weight_wire import LineClosed, connect, remove_abandoned
from fastrl.errors import WeightError

PROTOCOL = 2


class WeightReceiver:
    """Takes updates from a `WeightSender` of another process.

        receiver = WeightReceiver(address, token, tied=True)
        while True:
            receiver.check_manifest(expected)          # waits for the next update
            for name, tensor in receiver.tensors():
                load(name, tensor)                     # copy: the memory is reused once the loop goes on

    Args:
        address: of the sender.
        token: of the sender.
        tied: whether tied parameters are wanted under each of their names (`lm_head.weight` beside the embedding).
        timeout_s: longest silence of the trainer inside an update, in seconds.
    """

    def __init__(self, address: str, token: str, *, tied: bool = False, timeout_s: float = 300.0) -> None:
        self.address, self.timeout_s = address, timeout_s
        self.manifest: list[TensorSpec] = []
        self.names: dict[str, list[str]] = {}
        self.timeline = Timeline()
        self.version: int | None = None
        self.checksums: dict[str, int] = {}
        self.buckets: ReceiveBuckets | None = None
        self.transport: str | None = None
        self._sums: dict[str, Tensor] = {}
        self.verify = False
        self._state = "idle"  # idle -> begun -> ready -> idle
        hello = {"kind": "hello", "protocol": PROTOCOL, "pid": os.getpid(), "tied": tied}
        self.line = connect(address, token, hello)

    def begin(self, timeout_s: float | None = None) -> int:
        """Wait for the next update and read its manifest; returns its version.

        Args:
            timeout_s: longest wait in seconds; None waits until the trainer sends one or ends.
        """
        while True:
            message = self._receive(timeout_s)
            if message["kind"] == "buckets":
                self._open(message)
            elif message["kind"] == "update":
                break
            else:
                raise WeightError(f"the trainer sent {message['kind']!r} where an update was expected")
        self.version, self.timeline = int(message["version"]), Timeline()
        self.manifest = [TensorSpec.from_json(fields) for fields in message["manifest"]]
        self.names = names_by_tensor(self.manifest)
        self.verify, self.checksums, self._sums, self._state = bool(message["verify"]), {}, {}, "begun"
        return self.version

    def check_manifest(self, expected: Iterable[TensorSpec]) -> None:
        """Compare what is coming with what the engine expects, before the first byte; waits for an update if need be.

        Raises:
            WeightError: they differ (names, shapes or dtypes); the trainer is told and raises the same.
        """
        if self._state != "begun":
            self.begin()
        problem = compare_manifests(self.manifest, expected)
        if problem is not None:
            self._state = "idle"
            self.line.send({"kind": "refused", "why": problem})
            raise WeightError(f"update to version {self.version} refused: {problem}")
        self.line.send({"kind": "ready"})
        self._state = "ready"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the update, each valid until the loop advances.

        A bucket goes back to the trainer when the loop has advanced past its last tensor. Leaving the loop early ends
        the update on both sides.

        Raises:
            WeightError: the trainer is gone, or a checksum differs (the tensor is named).
        """
        if self._state != "ready":
            raise WeightError("tensors() needs check_manifest() before it")
        whole: dict[int, Tensor] = {}
        finished = False
        try:
            while (message := self._next())["kind"] == "bucket":
                yield from self._bucket(message, whole)
            finished = True
            self._finish(message)
        finally:
            self._state = "idle"
            if not finished:
                self.fail("the engine stopped reading in the middle of the update")

    def fail(self, why: str) -> None:
        """Tell the trainer that the update cannot be finished; it raises then."""
        try:
            self.line.send({"kind": "failed", "why": why})
        except LineClosed:
            remove_abandoned(self.address)  # nobody is left to be told

    def close(self) -> None:
        """Close the line and unmap the buckets."""
        self.line.close()
        if self.buckets is not None:
            self.buckets.close()

    def _open(self, message: dict[str, Any]) -> None:
        self.transport = str(message["transport"])
        try:
            if self.transport == "cuda_ipc":
                self.buckets = CudaIpcReceive(message)
            else:
                descriptors = self.line.receive_descriptors(NUM_SLOTS, self.timeout_s)
                self.buckets = SharedMemoryReceive(descriptors, int(message["bucket_bytes"]))
        except LineClosed:
            raise
        except (WeightError, OSError, RuntimeError) as error:
            self.line.send({"kind": "cannot", "why": str(error)})
            return
        self.line.send({"kind": "opened", **self.buckets.answer()})

    def _bucket(self, message: dict[str, Any], whole: dict[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
        assert self.buckets is not None
        slot, number = int(message["slot"]), int(message["number"])
        room = self.buckets.read(slot)
        for index, start, count, offset in message["pieces"]:
            spec = self.manifest[index]
            assert spec.dtype is not None
            size = spec.dtype.itemsize
            data = room[offset : offset + count * size]
            piece = data.view(spec.dtype)
            if count < spec.numel:
                if start == 0:
                    whole[index] = torch.empty(spec.numel, dtype=spec.dtype, device=room.device)
                whole[index][start : start + count].copy_(piece)
            if start + count == spec.numel:
                tensor = whole.pop(index, piece).view(spec.shape)
                with self.timeline.span("load", number):
                    for name in self.names[spec.name]:
                        yield name, tensor
            if self.verify:
                # after the engine has read it: a bucket that was overwritten under its eyes shows
                with self.timeline.span("checksum", number):
                    part = partial_checksum(data, start * size)
                    self._sums[spec.name] = self._sums[spec.name] + part if start else part
        self.line.send({"kind": "free", "slot": slot, **self.buckets.release(slot)})

    def _finish(self, message: dict[str, Any]) -> None:
        if message["kind"] != "end":
            raise WeightError(f"the trainer sent {message['kind']!r} in the middle of an update")
        sent = message["checksums"]
        self.checksums = {name: int(value) % 2**64 for name, value in self._sums.items()}
        self.line.send({"kind": "done", "checksums": self.checksums, "spans": self.timeline.to_json()})
        if sent is not None and sent != self.checksums:
            raise WeightError(differing(sent, self.checksums))

    def _next(self) -> dict[str, Any]:
        start = time.monotonic()
        message = self._receive(self.timeout_s)
        end = time.monotonic()
        self.timeline.add("idle", int(message.get("number", -1)), start, end, end - start, 0.0)
        return message

    def _receive(self, timeout_s: float | None) -> dict[str, Any]:
        try:
            message = self.line.receive(timeout_s)
        except LineClosed:
            remove_abandoned(self.address)
            raise
        if message["kind"] == "stop":
            raise WeightError(f"the trainer ended the update: {message['why']}")
        return message


def differing(sent: dict[str, int], got: dict[str, int]) -> str:
    """The first tensors whose checksums differ, in words."""
    names = [name for name in sent if sent[name] != got.get(name)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the engine received other bytes than were sent for {', '.join(names[:3])}{more}"
