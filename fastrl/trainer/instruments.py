"""Time and memory of phases, read without waiting for the device.

On a GPU work is queued: wall time between two lines of Python is the time to queue it. There a phase is measured
between two events of the device's own queue, and the events are read at the log boundary, where the step waits anyway.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Protocol

import torch

GIB = float(2**30)


class Clock(Protocol):
    """Marks moments now and tells the seconds between two of them later."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostClock:
    """Wall time of the host."""

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Seconds between two moments."""
        return end - start


class DeviceClock:
    """Time on the device's current stream: a mark is an event that happens when all work queued before it is done.

    A phase that keeps the device idle counts with its wall time, because its end is queued when the host gets there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """An event behind everything queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two events; waits for the second one."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class HostMemory:
    """Resident memory of this process, as far as the system tells without being reset.

    The kernel keeps one peak per process. A phase that raises it is known exactly; of others only what was resident at
    its borders. (Resetting the peak would take it from everybody else who reads it.)
    """

    def __init__(self) -> None:
        self.before = (0.0, 0.0)

    def reset(self) -> None:
        """A span begins."""
        self.before = self._read()

    def peak(self) -> float:
        """Highest resident bytes known of the span since `reset`; 0 where the system does not tell."""
        (resident, highest), (was_resident, was_highest) = self._read(), self.before
        return highest if highest > was_highest else max(resident, was_resident)

    def _read(self) -> tuple[float, float]:
        """(resident now, highest so far), bytes."""
        found = {"VmRSS:": 0.0, "VmHWM:": 0.0}
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line[:6] in found:
                    found[line[:6]] = float(line.split()[1]) * 1024.0
        return found["VmRSS:"], found["VmHWM:"]


class DeviceMemory:
    """Device memory in use by tensors; the allocator counts on the host, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """The peak starts again from what is in use now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> float:
        """Highest bytes since `reset`."""
        return float(torch.cuda.max_memory_allocated(self.device))


class PeakMemory:
    """Peaks of phases that may lie inside each other, from one counter that can only be read and reset."""

    def __init__(self, counter: HostMemory | DeviceMemory) -> None:
        self.counter = counter
        self.open: list[float] = []  # highest so far of each phase that has not ended
        self.highest = 0.0  # bytes, since `take`

    def begin(self) -> None:
        """A phase begins."""
        self._read()
        self.counter.reset()
        self.open.append(0.0)

    def end(self) -> float:
        """The phase begun last ends; its highest bytes."""
        self._read()
        return self.open.pop()

    def take(self) -> float:
        """Highest bytes since the last call."""
        self._read()
        found, self.highest = self.highest, 0.0
        return found

    def _read(self) -> None:
        now = self.counter.peak()
        self.open = [max(before, now) for before in self.open]
        self.highest = max(self.highest, now)


def memory_of(device: torch.device) -> PeakMemory:
    """The watch over the memory that work on `device` takes."""
    return PeakMemory(DeviceMemory(device) if device.type == "cuda" else HostMemory())
