"""New weights for an engine in another process, through two staging buckets.

    gather bucket k+1  |  pack and cast bucket k  |  the engine loads bucket k-1

The trainer walks the model once per update. A bucket is overwritten only after the engine has acknowledged it; names,
shapes and types are compared before the first byte; each end sums the bytes it has seen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.dist.weight_buckets import NUM_SLOTS, SendBuckets, SharedMemorySend
from fastrl.dist.weight_cuda import CudaIpcSend, cuda_ipc_problem
from fastrl.dist.weight_local import LocalReceiver, whole_tensors
from fastrl.dist.weight_plan import Bucket, TensorSpec, filled_bytes, plan_buckets
from fastrl.dist.weight_receiver import PROTOCOL, WeightReceiver, differing
from fastrl.dist.weight_gather import Gatherer
from fastrl.dist.weight_source import LoraMode, ModelSource
from fastrl.dist.weight_sums import Sums
from fastrl.dist.weight_timeline import Span, Timeline, spans_from_json
from fastrl.dist.weight_verify import VerifySchedule
from fastrl.dist.weight_wire import Door, Line, LineClosed
from fastrl.errors import WeightError

__all__ = ["Delivery", "LocalReceiver", "TensorSpec", "WeightReceiver", "WeightRefused", "WeightSender"]

TRANSPORTS = ("auto", "cuda_ipc", "shared_memory", "in_process")


@dataclass(frozen=True)
class Delivery:
    """What one update moved."""

    version: int
    bytes: int
    seconds: float
    checksums: dict[str, int] = field(default_factory=dict)  # by name; empty when the update was not verified
    transport: str = ""
    sent: tuple[Span, ...] = ()  # what the sender did when
    received: tuple[Span, ...] = ()  # what the receiver did when


class WeightRefused(WeightError):
    """The engine expects other tensors; nothing was sent."""


class WeightsDiffer(WeightError):
    """The engine received other bytes than were sent; trying again would hide why."""


class _Update:
    """One update under way: what is sent, in which buckets."""

    def __init__(self, source: ModelSource, version: int, bucket_bytes: int | None) -> None:
        self.version, self.verify = version, True
        self.timeline, self.received = Timeline(), list[Span]()
        entries = source.entries()
        self.specs = source.specs(entries)
        self.plan = whole_tensors(self.specs) if bucket_bytes is None else self._buckets(bucket_bytes)
        gatherer = Gatherer(entries, self.specs, self.timeline)
        self.collective = gatherer.collective
        self.walk = gatherer.walk(self.plan)
        self.bytes = sum(spec.num_bytes for spec in self.specs if spec.same_as is None)

    def _buckets(self, bucket_bytes: int) -> list[Bucket]:
        return plan_buckets(self.specs, filled_bytes(self.specs, bucket_bytes))

    def drain(self) -> None:
        """Take part in the gathers that are left: the other ranks' engines still want their weights."""
        if self.collective:
            for _ in self.walk:
                pass


class WeightSender:
    """Sends a model's weights to the receiver that connects to `address` with `token`.

    Every rank has its own sender and its own engine; with a sharded model all ranks call `send` together.

    Args:
        model: the policy; its parameters are looked up anew at each update.
        transport: `shared_memory`, `cuda_ipc`, `in_process` (see `attach`), or `auto`: CUDA IPC where the weights are on
            a GPU and both ends can, else shared memory. `fallback` says why it was not CUDA IPC.
        bucket_bytes: size of each of the two staging buckets.
        dtype: type that float tensors travel in, the engine's; None keeps each tensor's own.
        lora: what is sent of a model with adapters: `merged` weights or the `adapter` alone.
        verify: which updates have their checksums compared: `always`, `first` (to each engine process), `every K`, `off`.
        folder: where the socket's private folder is made; None takes the system's temporary folder.
        timeout_s: longest silence of the engine that is waited for, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        transport: str = "auto",
        bucket_bytes: int = 256 << 20,
        dtype: torch.dtype | None = None,
        lora: LoraMode = "merged",
        verify: str = "always",
        folder: str | Path | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if transport not in TRANSPORTS:
            raise WeightError(f"transport = {transport}: expected one of {', '.join(TRANSPORTS)}")
        self.source = ModelSource(model, dtype, lora=lora)
        self.requested, self.bucket_bytes = transport, bucket_bytes
        self.schedule, self.timeout_s = VerifySchedule(verify), timeout_s
        self.fallback: str | None = None
        self.load: Callable[[LocalReceiver], None] | None = None
        self.line: Line | None = None
        self.buckets: SendBuckets | None = None
        self.door = None if transport == "in_process" else Door(folder)
        self.address = self.door.address if self.door else ""
        self.token = self.door.token if self.door else ""

    @property
    def transport(self) -> str:
        """The transport in use; the requested one before a receiver has connected."""
        return self.buckets.kind if self.buckets is not None else self.requested

    def attach(self, load: Callable[[LocalReceiver], None], *, tied: bool = False) -> None:
        """Name the function that loads an update in this process (transport `in_process`).

        Args:
            load: calls `check_manifest(expected)` and reads `tensors()` of the receiver that it is given, to the end.
            tied: whether tied parameters are wanted under each of their names.
        """
        self.load, self.source.tied = load, tied

    def manifest(self) -> list[TensorSpec]:
        """What an update sends: names, shapes and types."""
        return self.source.specs(self.source.entries())

    def send(self, version: int, *, verify: bool | None = None) -> Delivery:
        """Deliver the current weights; returns when the engine has taken all of them.

        Args:
            version: number of the update, as `policy_version`.
            verify: whether checksums are compared; None asks the sender's schedule.

        Raises:
            WeightError: no receiver, the engine refused or died, or received other bytes than were sent. The other
                ranks of a sharded model are not held up.
        """
        started = time.monotonic()
        update = _Update(self.source, version, None if self.door is None else self.bucket_bytes)
        try:
            if self.door is None:
                update.verify = self.schedule.due() if verify is None else verify
                checksums = self._send_here(update)
            else:
                line, update = self._announce(update, verify)
                checksums = self._send_there(line, update)
        except WeightError:
            update.drain()
            raise
        spans = tuple(update.timeline.spans.values()), tuple(update.received)
        return Delivery(version, update.bytes, time.monotonic() - started, checksums, self.transport, *spans)

    def take_part(self) -> None:
        """Join the gathers of an update without an engine to send to: the engines of other ranks want theirs."""
        _Update(self.source, 0, None if self.door is None else self.bucket_bytes).drain()

    def close(self) -> None:
        """Close the line, give the buckets back and remove the socket."""
        if self.line is not None and self.transport == "cuda_ipc":
            self.line.hang_up(2.0)  # GPU memory must not be freed while the engine maps it
        self._drop()
        if self.buckets is not None:
            self.buckets.close()
            self.buckets = None
        if self.door is not None:
            self.door.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send_here(self, update: _Update) -> dict[str, int]:
        if self.load is None:
            raise WeightError("in_process: attach() names the function that loads an update; call it first")
        receiver = LocalReceiver(update.version, update.specs, update.walk, update.verify)
        self.load(receiver)
        if not receiver.finished:
            raise WeightError(f"the engine did not read the update to version {update.version} to its end")
        if receiver.sent != receiver.checksums:
            raise WeightsDiffer(differing(receiver.sent, receiver.checksums))
        return receiver.sent

    def _announce(self, update: _Update, verify: bool | None) -> tuple[Line, _Update]:
        """A line with the update announced; one whose engine was restarted since is replaced by the new engine's."""
        for attempt in range(2):
            if self.line is None:
                self.line = self._accept()
                self.schedule.restart()
                update = _Update(self.source, update.version, self.bucket_bytes)
            update.verify = self.schedule.due() if verify is None else verify
            fields = [spec.to_json() for spec in update.specs]
            try:
                self.line.send(
                    {"kind": "update", "version": update.version, "manifest": fields, "verify": update.verify}
                )
                return self.line, update
            except LineClosed:
                self._drop()
                if attempt:
                    raise
        raise AssertionError("unreachable")

    def _accept(self) -> Line:
        """The next engine that connects, with the buckets opened."""
        assert self.door is not None
        line, hello = self.door.accept(self.timeout_s)
        if hello.get("protocol") != PROTOCOL:
            line.close()
            raise WeightError(f"the engine speaks protocol {hello.get('protocol')}, the trainer {PROTOCOL}")
        self.source.tied = bool(hello.get("tied"))
        if self.buckets is not None:
            self._offer(line, self.buckets)
            return line
        for kind in self._candidates():
            try:
                buckets = self._make(kind)
                try:
                    self._offer(line, buckets)
                except BaseException:
                    buckets.close()
                    raise
                self.buckets = buckets
                return line
            except LineClosed:
                raise
            except WeightError as error:
                if kind == "shared_memory" or self.requested != "auto":
                    line.close()
                    raise
                self.fallback = str(error)
        raise AssertionError("unreachable")

    def _candidates(self) -> list[str]:
        if self.requested != "auto":
            return [self.requested]
        self.fallback = cuda_ipc_problem(self._device())
        return ["shared_memory"] if self.fallback else ["cuda_ipc", "shared_memory"]

    def _make(self, kind: str) -> SendBuckets:
        if kind == "shared_memory":
            return SharedMemorySend(self.bucket_bytes)
        problem = cuda_ipc_problem(self._device())
        if problem is not None:
            raise WeightError(f"rollout.weight_transport = cuda_ipc: {problem}; use auto or shared_memory")
        return CudaIpcSend(self.bucket_bytes, self._device())

    def _device(self) -> torch.device:
        return next((p.device for p in self.source.model.parameters()), torch.device("cpu"))

    def _offer(self, line: Line, buckets: SendBuckets) -> None:
        fields, descriptors = buckets.offer()
        line.send({"kind": "buckets", **fields}, descriptors)
        answer = self._answer(line, ("opened", "cannot"))
        if answer["kind"] == "cannot":
            raise WeightError(f"the engine cannot open the buckets: {answer['why']}")
        buckets.opened(answer)

    def _send_there(self, line: Line, update: _Update) -> dict[str, int]:
        version = update.version
        try:
            refusal = self._answer(line, ("ready", "refused")).get("why")
            if refusal is not None:
                raise WeightRefused(f"update to version {version} refused: {refusal}")
            sums = self._send_buckets(line, update)
            checksums = {update.specs[i].name: int(value) % 2**64 for i, value in sums.items()}
            line.send({"kind": "end", "checksums": checksums if update.verify else None})
            answer = self._answer(line, ("done",))
            update.received, received = spans_from_json(answer["spans"]), answer["checksums"]
            if received != checksums:
                raise WeightsDiffer(differing(checksums, received))
            return checksums
        except LineClosed as error:
            why = last_words(line)
            self._drop()
            raise WeightError(
                f"the engine could not load the update to version {version}: {why}"
                if why
                else f"the engine process ended during the update to version {version}: {error}"
            ) from error
        except WeightRefused:
            raise  # nothing was sent: the line is as it was
        except BaseException as error:
            self._stop(line, error)
            raise

    def _send_buckets(self, line: Line, update: _Update) -> dict[int, Tensor]:
        """Fill and announce every bucket; returns the checksum of each tensor, on its device."""
        assert self.buckets is not None
        sums, timeline = Sums(update.specs, update.timeline), update.timeline
        for number, (bucket, parts) in enumerate(update.walk):
            slot = number % NUM_SLOTS
            if number >= NUM_SLOTS:
                self._wait_free(line, update, number - NUM_SLOTS)
            sums.begin(number, bucket)
            with timeline.span("pack", number):
                early = update.verify and self.buckets.sums_as_it_fills
                room = self.buckets.fill(slot, parts, sums.add if early else None)
            pieces = [piece.to_json() for piece in bucket]
            line.send({"kind": "bucket", "slot": slot, "number": number, "pieces": pieces})
            if update.verify and not early:
                sums.add_all(room)  # while the engine reads it, too
        for number in range(max(0, len(update.plan) - NUM_SLOTS), len(update.plan)):
            self._wait_free(line, update, number)
        return sums.by_index

    def _wait_free(self, line: Line, update: _Update, number: int) -> None:
        slot = number % NUM_SLOTS
        with update.timeline.span("wait", number):
            answer = self._answer(line, ("free",))
        if answer["slot"] != slot:
            raise WeightError(f"the engine freed bucket {answer['slot']} where {slot} was due")
        assert self.buckets is not None
        self.buckets.freed(slot)

    def _answer(self, line: Line, kinds: Sequence[str]) -> dict[str, Any]:
        message = line.receive(self.timeout_s)
        if message["kind"] == "failed":
            raise WeightError(f"the engine could not load the update: {message['why']}")
        if message["kind"] not in kinds:
            raise WeightError(f"the engine sent {message['kind']!r} where {' or '.join(kinds)} was expected")
        return message

    def _stop(self, line: Line, error: BaseException) -> None:
        """End an update that failed here; the line is dropped, because what was under way on it is unknown."""
        with contextlib.suppress(LineClosed):
            line.send({"kind": "stop", "why": str(error) or type(error).__name__})
        self._drop()

    def _drop(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None


def last_words(line: Line) -> str | None:
    """What a peer that is gone said last about its failure, if it did."""
    with contextlib.suppress(WeightError, ValueError):
        while True:
            message = line.receive(0.1)
            if message["kind"] == "failed":
                return str(message["why"])
    return None
