"""One call: its tensors, its CPU seconds, its peak memory. Used in the benchmark's process and in the peers'."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLOCKS: dict[str, Callable[[], float]] = {
    "thread": time.thread_time,  # what this thread used; the rest of the machine does not count
    "process": time.process_time,  # for code that computes in threads of its own
}
SHORTEST_S = 0.005  # a timing covers at least this much, in several calls if need be
MOST_LOOPS = 64


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, whatever they are nested in, without gradients."""
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [tensor for part in result for tensor in tensors_of(part)]
    return []


def seconds(run: Callable[[], Any], loops: int = 1, clock: str = "thread") -> float:
    """CPU seconds of one call, the mean of `loops` calls."""
    read = CLOCKS[clock]
    start = read()
    for _ in range(loops):
        run()
    return (read() - start) / loops


def checked(run: Callable[[], Any], clock: str = "thread") -> tuple[list[torch.Tensor], float]:
    """The tensors that are compared with the reference, and the seconds it took to make them.

    A call whose timed result cannot be compared (it draws at random) has a `check` that gives one that can be.
    """
    read = CLOCKS[clock]
    start = read()
    found = tensors_of(getattr(run, "check", run)())
    return found, read() - start


def loops_for(one_call_s: float) -> int:
    """Calls that a timing has to cover so that the clock's grain does not matter."""
    return max(1, min(MOST_LOOPS, round(SHORTEST_S / max(one_call_s, 1e-9))))


def resident(field: str) -> int:
    """A size of /proc/self/status in bytes, 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def peak_bytes(run: Callable[[], Any]) -> int | None:
    """How far one call lifts the resident memory, in a child process that makes it once; None where it cannot be read.

    `run.forget`, if there is one, is called in the child first: it drops what earlier calls have left behind.
    """
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            getattr(run, "forget", int)()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
            before, code = resident("VmRSS"), resident("RssFile")
            run()
            code = resident("RssFile") - code  # pages of libraries that a fresh child maps again: no memory of the call
            os.write(writer, str(max(resident("VmHWM") - before - code, 0)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text) if text else None
