"""Starts the ranks of one machine, watches them, and says which one failed first.

The launching process keeps the store that the ranks meet at, so no port is guessed and what they said about themselves
outlives them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

from fastrl.dist.failure import Failure, Status, read_failure, read_status
from fastrl.errors import FastRLError, ProcessError, Terminated

_HOST = "127.0.0.1"
_POLL_S = 0.05
_GRACE_S = 10.0  # for the other ranks to end by themselves once one has failed
_STACK_S = 2.0  # for a rank that is still running to write where it is
_STACK_LINES = 60
STACK_FILE = "FASTRL_STACK_FILE"
# Python for the start of a rank, before anything is imported: SIGUSR1 makes it write the stacks of its threads.
SHOW_STACK = (
    "import faulthandler, os, signal; "
    f"faulthandler.register(signal.SIGUSR1, open(os.environ['{STACK_FILE}'], 'w')); "
)


def launch(command: Sequence[str], num_processes: int, *, timeout_s: float) -> dist.Store:
    """Run `command` as ranks 0 .. num_processes - 1 of this machine until all have ended well.

    Args:
        command: program and arguments; each rank reads its number from the environment (`fastrl.dist.mesh.place`), and
            one that begins with `SHOW_STACK` can be asked where it hangs.
        num_processes: ranks to start.
        timeout_s: how long the ranks may take to stop after SIGTERM, in seconds.

    Returns:
        the store of the ranks, with what they left in it.

    Raises:
        FastRLError: the first failing rank's own deliberate error, or a ProcessError with its exception and place.
        KeyboardInterrupt, Terminated: this process was asked to stop, and the ranks have.
    """
    server = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    store = dist.PrefixStore("fastrl/0", server)  # as `fastrl.dist.mesh.meet` names it for a first attempt
    envs = {rank: _environment(rank, num_processes, server.port) for rank in range(num_processes)}
    with tempfile.TemporaryDirectory(prefix="fastrl-") as folder, _signals_kept():
        stacks = {rank: Path(folder) / f"rank_{rank}.stack" for rank in envs}
        for rank, path in stacks.items():
            envs[rank][STACK_FILE] = str(path)
        context = cast(
            SubprocessContext,
            start_processes(
                "fastrl",
                command[0],
                args={rank: tuple(command[1:]) for rank in envs},
                envs=envs,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            ),
        )
        watch = _Watch(context, store, stacks, timeout_s)
        try:
            watch.run()
        finally:
            context.close(signal.SIGKILL, timeout=5)
    return store


def die_with_launcher() -> None:
    """Ask Linux to kill this process when the launcher is killed, so that no rank is left behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Environment variables of one rank, those of torchrun."""
    threads = max(1, len(os.sched_getaffinity(0)) // size) if hasattr(os, "sched_getaffinity") else 1
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Puts this process's own signal handlers back at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Watch:
    """Waits for ranks and passes signals on to them."""

    def __init__(
        self, context: SubprocessContext, store: dist.Store, stacks: dict[int, Path], timeout_s: float
    ) -> None:
        self.context, self.store, self.stacks, self.timeout_s = context, store, stacks, timeout_s
        self.size = len(stacks)
        self.asked: signal.Signals | None = None
        self.deadline = float("inf")
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED:
                signal.signal(number, self._forward)

    def _forward(self, number: int, frame: object) -> None:
        """Pass a signal on; the second one ends the ranks at once."""
        again, self.asked = self.asked is not None, signal.Signals(number)
        patience = 0.0 if again else self.timeout_s if number == signal.SIGTERM else _GRACE_S
        self.deadline = min(self.deadline, time.monotonic() + patience)
        for rank, pid in self.context.pids().items():
            if self.code(rank) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def code(self, rank: int) -> int | None:
        """Exit code of a rank (negative: a signal), None while it runs."""
        return self.context.subprocess_handlers[rank].proc.poll()

    def run(self) -> None:
        """Until every rank has ended; raises what the first failing one left."""
        while True:
            codes = [self.code(rank) for rank in range(self.size)]
            if None not in codes or time.monotonic() > self.deadline:
                break
            if any(codes):
                self.deadline = min(self.deadline, time.monotonic() + _GRACE_S)
            time.sleep(_POLL_S)
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        if any(codes) or None in codes:
            raise self.error(codes)
        if self.asked is not None:
            raise Terminated(f"ended after {self.asked.name}")

    def error(self, codes: list[int | None]) -> FastRLError:
        """The first cause: a rank killed from outside, then one that failed by itself, then one that lost another."""
        failures = [f for f in (read_failure(self.store, rank) for rank in range(self.size)) if f is not None]
        known = {failure.rank for failure in failures}
        own = [f for f in failures if not f.caused_by_others]
        silent = [(rank, code) for rank, code in enumerate(codes) if code and rank not in known]
        aborted = silent and all(-code == signal.SIGABRT for _, code in silent)  # NCCL does this to those who wait
        if silent and not (aborted and own):
            text = "; ".join(self._ended(rank, code) for rank, code in silent)
            return ProcessError(text + (self._absent(known | {rank for rank, _ in silent}) if aborted else ""))
        if own:
            return min(own, key=lambda f: f.time).error()
        if not failures:
            return ProcessError(f"the ranks did not stop within {self.timeout_s:g} s of {self.asked}")
        return self._lost(min(failures, key=lambda f: f.time), known)

    def _lost(self, failure: Failure, known: set[int]) -> FastRLError:
        """A rank waited in vain: where the others stood."""
        return ProcessError(failure.text() + self._absent(known))

    def _absent(self, known: set[int]) -> str:
        """The ranks that said nothing and were still running when the others gave up, with their stacks."""
        missing = [rank for rank in range(self.size) if rank not in known]
        return "".join(
            f"\nrank {rank} did not take part: it was in {self._stood(rank)}{self._stack(rank)}" for rank in missing
        )

    def _stack(self, rank: int) -> str:
        """Where a rank that still runs is in its Python code; "" where it cannot say so."""
        if self.code(rank) is not None or not self.stacks[rank].exists():
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.context.pids()[rank], signal.SIGUSR1)
        size, end = -1, time.monotonic() + _STACK_S
        while time.monotonic() < end and (size <= 0 or self.stacks[rank].stat().st_size > size):
            size = self.stacks[rank].stat().st_size
            time.sleep(2 * _POLL_S)
        lines = self.stacks[rank].read_text(encoding="utf-8", errors="replace").splitlines()[:_STACK_LINES]
        return "".join(f"\n    {line}" for line in lines)

    def _ended(self, rank: int, code: int) -> str:
        """How a rank ended that could say nothing any more."""
        how = f"ended with exit code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was ended by signal {name}"
            if -code == signal.SIGKILL:
                how += " (which the system sends when memory runs out, see dmesg)"
        return f"rank {rank} {how} in {self._stood(rank)}"

    def _stood(self, rank: int) -> str:
        status: Status | None = read_status(self.store, rank)
        return "phase starting" if status is None else f"{status} since {time.time() - status.since:.0f} s"
