"""New weights for an engine in another process, through two staging buckets.

    gather bucket k+1  |  pack and cast bucket k  |  the engine loads bucket k-1

The trainer walks the model once per update. A bucket is overwritten only after the engine has acknowledged it; names,
shapes and types are compared before the first byte; each end sums the bytes it has seen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.dist.weight_buckets import NUM_SLOTS, SendBuckets, SharedMemorySend
from fastrl.dist.weight_checksum import partial_checksum
from fastrl.dist.weight_plan import Bucket, TensorSpec, plan_buckets
from fastrl.dist.weight_receiver import PROTOCOL, WeightReceiver, differing
from fastrl.dist.weight_source import Entry, ModelSource
from fastrl.dist.weight_wire import Door, Line, LineClosed
from fastrl.errors import WeightError

__all__ = ["Delivery", "TensorSpec", "WeightReceiver", "WeightSender"]


@dataclass(frozen=True)
class Delivery:
    """What one update moved."""

    version: int
    bytes: int
    seconds: float
    checksums: dict[str, int] = field(default_factory=dict)  # empty when the update was not verified


class WeightRefused(WeightError):
    """The engine expects other tensors; nothing was sent."""


class WeightSender:
    """Sends a model's weights to the receiver that connects to `address` with `token`.

    Args:
        model: the policy; its parameters are read anew at each update.
        transport: shared_memory.
        bucket_bytes: size of each of the two staging buckets.
        dtype: type that float tensors travel in, the engine's; None keeps each tensor's own.
        verify: whether checksums are compared, unless `send` says otherwise.
        folder: where the socket's private folder is made; None takes the system's temporary folder.
        timeout_s: longest silence of the engine that is waited for, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        transport: str = "shared_memory",
        bucket_bytes: int = 256 << 20,
        dtype: torch.dtype | None = None,
        verify: bool = True,
        folder: str | Path | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.source = ModelSource(model, dtype)
        self.transport, self.bucket_bytes = transport, bucket_bytes
        self.verify, self.timeout_s = verify, timeout_s
        self.line: Line | None = None
        self.buckets: SendBuckets | None = None
        self.door = Door(folder)
        self.address, self.token = self.door.address, self.door.token

    def manifest(self) -> list[TensorSpec]:
        """What an update sends: names, shapes and types."""
        return self.source.specs(self.source.entries())

    def send(self, version: int, *, verify: bool | None = None) -> Delivery:
        """Deliver the current weights; returns when the engine has taken all of them.

        Args:
            version: number of the update, as `policy_version`.
            verify: whether checksums are compared; None takes the sender's setting.

        Raises:
            WeightError: no receiver, the engine refused or died, or received other bytes than were sent.
        """
        started = time.monotonic()
        verify = self.verify if verify is None else verify
        line, entries, specs = self._open(version, verify)
        try:
            refusal = self._answer(line, ("ready", "refused")).get("why")
            if refusal is not None:
                raise WeightRefused(f"update to version {version} refused: {refusal}")
            sums = self._send_buckets(line, entries, specs, verify)
            checksums = {specs[i].name: int(value) % 2**64 for i, value in sums.items()}
            line.send({"kind": "end", "checksums": checksums if verify else None})
            received = self._answer(line, ("done",))["checksums"]
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
        except WeightError as error:
            self._stop(line, error)
            raise
        if verify and received != checksums:
            raise WeightError(differing(checksums, received))
        moved = sum(spec.num_bytes for spec in specs if spec.same_as is None)
        return Delivery(version, moved, time.monotonic() - started, checksums if verify else {})

    def close(self) -> None:
        """Close the line, give the buckets back and remove the socket."""
        self._drop()
        if self.buckets is not None:
            self.buckets.close()
            self.buckets = None
        self.door.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, version: int, verify: bool) -> tuple[Line, list[Entry], list[TensorSpec]]:
        """A line with the update announced; one whose engine was restarted since is replaced by the new engine's."""
        for attempt in range(2):
            line = self.line or self._accept()
            entries = self.source.entries()
            specs = self.source.specs(entries)
            fields = [spec.to_json() for spec in specs]
            try:
                line.send({"kind": "update", "version": version, "manifest": fields, "verify": verify})
                return line, entries, specs
            except LineClosed:
                self._drop()
                if attempt:
                    raise
        raise AssertionError("unreachable")

    def _accept(self) -> Line:
        line, hello = self.door.accept(self.timeout_s)
        if hello.get("protocol") != PROTOCOL:
            line.close()
            raise WeightError(f"the engine speaks protocol {hello.get('protocol')}, the trainer {PROTOCOL}")
        self.source.tied = bool(hello.get("tied"))
        if self.buckets is None:
            self.buckets = SharedMemorySend(self.bucket_bytes)
        fields, descriptors = self.buckets.offer()
        line.send({"kind": "buckets", **fields}, descriptors)
        self._answer(line, ("opened",))
        self.line = line
        return line

    def _send_buckets(
        self, line: Line, entries: Sequence[Entry], specs: Sequence[TensorSpec], verify: bool
    ) -> dict[int, Tensor]:
        """Pack and announce every bucket; returns the checksum of each tensor, on its device."""
        assert self.buckets is not None
        sums: dict[int, Tensor] = {}
        plan = plan_buckets(specs, self.bucket_bytes)
        for number, bucket in enumerate(plan):
            slot = number % NUM_SLOTS
            if number >= NUM_SLOTS:
                self._wait_free(line, slot)
            room = self._pack(slot, bucket, entries, specs)
            if verify:
                add_checksums(sums, room, bucket, specs)
            pieces = [piece.to_json() for piece in bucket]
            line.send({"kind": "bucket", "slot": slot, "pieces": pieces, **self.buckets.filled(slot)})
        for number in range(max(0, len(plan) - NUM_SLOTS), len(plan)):
            self._wait_free(line, number % NUM_SLOTS)
        return sums

    def _pack(self, slot: int, bucket: Bucket, entries: Sequence[Entry], specs: Sequence[TensorSpec]) -> Tensor:
        assert self.buckets is not None
        parts = []
        for piece in bucket:
            dtype = specs[piece.index].dtype
            assert dtype is not None
            flat = entries[piece.index].tensor.detach().reshape(-1)
            parts.append((flat[piece.start : piece.start + piece.count], dtype, piece.offset))
        return self.buckets.fill(slot, parts)

    def _wait_free(self, line: Line, slot: int) -> None:
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

    def _stop(self, line: Line, error: WeightError) -> None:
        """End an update that failed here; the line is dropped, because what was under way on it is unknown."""
        with contextlib.suppress(LineClosed):
            line.send({"kind": "stop", "why": str(error)})
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


def add_checksums(sums: dict[int, Tensor], room: Tensor, bucket: Bucket, specs: Sequence[TensorSpec]) -> None:
    """Add the checksums of a bucket's pieces to those of their tensors."""
    for piece in bucket:
        dtype = specs[piece.index].dtype
        assert dtype is not None
        data = room[piece.offset : piece.offset + piece.count * dtype.itemsize]
        part = partial_checksum(data, piece.start * dtype.itemsize)
        sums[piece.index] = sums[piece.index] + part if piece.index in sums else part
