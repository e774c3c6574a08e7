"""What every rank tells the others about itself: where it stands, and what ended it.

The store of the process group holds both, so that whoever is left can say which rank was the first to fail and in which
phase of which step, also of a rank that was killed and of one that hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fastrl import errors
from fastrl.errors import EXIT_FAILURE, EXIT_INTERRUPTED, FastRLError

_STATUS, _FAILURE = "status/{}", "failure/{}"
# How the collectives of gloo, NCCL and the store say that another rank is gone or late.
_OTHERS_FAULT = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
    "wait timeout",
    "application timeout",
    "broken pipe",
    "connection refused",
    "socket closed",
    "failed to recv",
    "failed to send",
    "remote process exited",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
)


@dataclass(frozen=True)
class Status:
    """Where a rank stood when it last said so."""

    step: int  # 0 before the first step
    phase: str
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        return f"phase {self.phase}" + (f" of step {self.step}" if self.step else "")


@dataclass(frozen=True)
class Failure:
    """What ended a rank."""

    rank: int
    kind: str  # class of the exception
    message: str
    trace: str  # "" for deliberate errors
    exit_code: int
    caused_by_others: bool  # a collective failed because another rank was gone or late
    status: Status
    time: float  # seconds since the epoch

    def text(self) -> str:
        """For the terminal: the rank's own exception with its phase and step."""
        if not self.trace:
            return self.message + (f" (rank {self.rank}, {self.status})" if self.status.step else "")
        return f"{self.trace.rstrip()}\nrank {self.rank} failed in {self.status}: {self.kind}: {self.message}"

    def error(self) -> FastRLError:
        """The exception that the launching process raises: deliberate errors come back as what they were."""
        cls = getattr(errors, self.kind, errors.ProcessError) if not self.trace else errors.ProcessError
        error: FastRLError = cls(self.text())
        error.exit_code = self.exit_code
        return error


class Whereabouts:
    """Tells the store in which phase of which step this rank is; without a store only remembers it."""

    def __init__(self, store: dist.Store | None = None, rank: int = 0, size: int = 1) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.status = Status(0, "starting", time.time())

    def enter(self, phase: str, step: int = 0) -> None:
        """A phase begins."""
        self.status = Status(step, phase, time.time())
        if self.store is not None:
            self.store.set(_STATUS.format(self.rank), json.dumps(asdict(self.status)))

    def report(self, error: BaseException) -> Failure:
        """Leave what ended this rank in the store."""
        deliberate, interrupted = isinstance(error, FastRLError), isinstance(error, KeyboardInterrupt)
        others = is_others_fault(error)
        failure = Failure(
            rank=self.rank,
            kind=type(error).__name__,
            message=str(error) + (f"\nit waited for another rank: {self.others()}" if others else ""),
            trace="" if deliberate or interrupted else "".join(traceback.format_exception(error)),
            exit_code=exit_code_of(error),
            caused_by_others=others,
            status=self.status,
            time=time.time(),
        )
        if self.store is not None:
            self.store.set(_FAILURE.format(self.rank), json.dumps(asdict(failure)))
        return failure

    def others(self) -> str:
        """Which ranks stand elsewhere, for the message of one that waited for them."""
        if self.store is None or self.size == 1:
            return ""
        try:
            found = {rank: read_status(self.store, rank) for rank in range(self.size) if rank != self.rank}
        except (dist.DistError, RuntimeError):  # the store is gone with the machine that kept it
            return ""
        mine = (self.status.step, self.status.phase)
        behind = [
            f"rank {rank} stood in {status}, entered {time.time() - status.since:.0f} s ago"
            for rank, status in found.items()
            if status is not None and (status.step, status.phase) != mine
        ]
        return "; ".join(behind) or "every rank that could say so stood in this phase"


@contextmanager
def reporting(whereabouts: Whereabouts) -> Iterator[Whereabouts]:
    """Whatever ends the block reaches the store before it goes on its way."""
    try:
        yield whereabouts
    except BaseException as error:
        with contextlib.suppress(dist.DistError):  # the store may be gone with the machine that kept it
            whereabouts.report(error)
        if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
            get_error_handler().record_exception(error)  # torchrun shows it in its summary
        raise


def exit_code_of(error: BaseException) -> int:
    """What the command line returns for an exception."""
    if isinstance(error, FastRLError):
        return error.exit_code
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILURE


def is_others_fault(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, also one that another error was made from."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(words in text for words in _OTHERS_FAULT):
            return True
        seen = seen.__cause__
    return False


def read_status(store: dist.Store, rank: int) -> Status | None:
    """Where `rank` stood last, if it has ever said so."""
    key = _STATUS.format(rank)
    return Status(**json.loads(store.get(key))) if store.check([key]) else None


def read_failure(store: dist.Store, rank: int) -> Failure | None:
    """What ended `rank`, if it could still say so."""
    key = _FAILURE.format(rank)
    if not store.check([key]):
        return None
    values = json.loads(store.get(key))
    return Failure(**values | {"status": Status(**values["status"])})
