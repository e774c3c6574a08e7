"""The trainer's side of the reward processes: one thread per process, which starts, feeds, times and replaces it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from fastrl.errors import RewardError
from fastrl.rewards.base import Failure

ELSEWHERE = "elsewhere"  # in the place of a function that no reward process calls
START_TIMEOUT_S = 120.0  # importing the functions' modules counts here, not in a call's own limit
ASYNC_GRACE_S = 5.0  # silence of an event loop, beyond the time limit, that counts as blocked
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from fastrl.rewards.worker import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True)
class Setup:
    """What a reward process is told at its start."""

    functions: list[tuple[str, str]]  # (name, built-in name or package.module:function)
    settings: dict[str, Any]  # of the built-in functions
    timeout_s: float
    is_async: bool = False
    max_concurrency: int = 64


@dataclass
class Job:
    """One call: which function, on what, and who is told. `deliver` is called exactly once, from a pool thread."""

    index: int
    name: str
    payload: Any
    deliver: Callable[[Any], None]
    cancelled: Callable[[], bool] = lambda: False


class Worker:
    """A running reward process and its pipe. Not thread-safe: each belongs to one thread."""

    def __init__(self, setup: Setup) -> None:
        self.connection, theirs = Pipe()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal goes to the trainer alone
        )
        theirs.close()
        try:
            self.signatures = self._hand_over(setup)
        except BaseException:
            self.kill()
            raise

    def _hand_over(self, setup: Setup) -> list[Any]:
        try:
            self.connection.send(vars(setup))
            if not self.connection.poll(START_TIMEOUT_S):
                raise RewardError(f"a reward process did not start within {START_TIMEOUT_S:g} s")
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            code = self.process.wait(timeout=5)
            raise RewardError(f"a reward process died while starting (exit code {code})") from error
        if answer[0] == "broken":
            listed = ", ".join(path for _, path in setup.functions)
            raise RewardError(f"reward functions {listed} cannot be loaded: {answer[1]}\n{answer[2]}")
        return answer[1]

    def death(self) -> str:
        """How the process ended, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"its process died (exit code {self.process.wait(timeout=5)})"
        return "its process closed the pipe"

    def kill(self) -> None:
        """End the process now; safe to call twice."""
        with contextlib.suppress(OSError):
            self.connection.close()
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)


class SyncLane(threading.Thread):
    """Serves jobs of a shared queue one at a time, in a process that is replaced when a call takes too long."""

    def __init__(self, setup: Setup, jobs: queue.SimpleQueue[Job | None], *, eager: bool = False) -> None:
        super().__init__(daemon=True, name="fastrl-reward")
        self.eager = eager  # start the process at once, not at the first job
        self.setup = setup
        self.jobs = jobs
        self.worker: Worker | None = None
        self.closing = False
        self.started: queue.SimpleQueue[list[Any] | RewardError] = queue.SimpleQueue()

    def signatures(self) -> list[Any]:
        """Signatures of all functions (None for built-in ones), once the process has loaded them; ask once.

        Raises:
            RewardError: a function cannot be imported or called.
        """
        answer = self.started.get()
        if isinstance(answer, RewardError):
            raise answer
        return answer

    def run(self) -> None:
        if self.eager:
            try:
                self.worker = Worker(self.setup)
                self.started.put(self.worker.signatures)
            except (RewardError, OSError) as error:
                self.started.put(RewardError(str(error)))
                return
        while (job := self.jobs.get()) is not None:
            if self.closing or job.cancelled():
                continue
            job.deliver(self._serve(job))
        if self.worker:
            self.worker.kill()

    def _serve(self, job: Job) -> Any:
        """The outcome of one job; whatever happens to the process, there is one."""
        try:
            # the thread that starts the process must outlive it: it dies with its parent thread
            worker = self.worker = self.worker or Worker(self.setup)
        except (RewardError, OSError) as error:
            return Failure(job.name, str(error))
        if self.closing:
            return Failure(job.name, "the pool was closed")
        try:
            worker.connection.send((0, job.index, job.payload))
            if worker.connection.poll(self.setup.timeout_s):
                return worker.connection.recv()[1]
            result = Failure(job.name, f"timed out after {self.setup.timeout_s:g} s and was killed")
        except (EOFError, OSError):
            result = Failure(job.name, worker.death())
        except Exception as error:  # e.g. a payload that cannot be pickled; nothing was sent
            return Failure(job.name, f"{type(error).__name__}: {error}")
        worker.kill()
        self.worker = None
        return result

    def stop_worker(self) -> None:
        """End the process under a call that is still running (used when the pool closes)."""
        self.closing = True
        if self.worker:
            self.worker.process.kill()


class AsyncLane(threading.Thread):
    """Serves coroutines, many at a time, in one process that is replaced when its event loop stands still."""

    def __init__(self, setup: Setup, jobs: queue.SimpleQueue[Job | None]) -> None:
        super().__init__(daemon=True, name="fastrl-reward-async")
        self.setup = setup
        self.jobs = jobs
        self.worker: Worker | None = None
        self.in_flight: dict[int, Job] = {}
        self.next_id = 0
        self.closing = False

    def run(self) -> None:
        last_sign_of_life = time.monotonic()
        while True:
            if not self._accept(block=not self.in_flight):
                break
            if self.worker is None:  # could not be started: _accept has delivered the failure
                continue
            try:
                while self.worker.connection.poll(0.02):
                    last_sign_of_life = time.monotonic()
                    self._deliver(*self.worker.connection.recv())
            except (EOFError, OSError):
                self._give_up(self.worker.death())
                continue
            if not self.in_flight:
                last_sign_of_life = time.monotonic()
            elif time.monotonic() - last_sign_of_life > self.setup.timeout_s + ASYNC_GRACE_S:
                self._give_up("an async function blocked the event loop; its process was killed")
        if self.worker:
            self.worker.kill()

    def _accept(self, block: bool) -> bool:
        """Send what waits in the queue to the process; False when the pool closes."""
        while True:
            try:
                job = self.jobs.get(timeout=1.0 if block else 0.0)
            except queue.Empty:
                if block and self.worker:
                    self._drain()
                    continue
                return True
            block = False
            if job is None:
                return False
            if self.closing or job.cancelled():
                continue
            self._send(job)

    def _drain(self) -> None:
        """Read heartbeats while nothing is in flight, so that the pipe never fills."""
        assert self.worker is not None
        with contextlib.suppress(EOFError, OSError):
            while self.worker.connection.poll():
                self.worker.connection.recv()

    def _send(self, job: Job) -> None:
        try:
            self.worker = self.worker or Worker(self.setup)
        except (RewardError, OSError) as error:
            job.deliver(Failure(job.name, str(error)))
            return
        self.next_id += 1
        self.in_flight[self.next_id] = job
        try:
            self.worker.connection.send((self.next_id, job.index, job.payload))
        except OSError:
            self._give_up(self.worker.death())
        except Exception as error:
            del self.in_flight[self.next_id]
            job.deliver(Failure(job.name, f"{type(error).__name__}: {error}"))

    def _deliver(self, job_id: int | None, result: Any) -> None:
        if job_id is not None:
            self.in_flight.pop(job_id).deliver(result)

    def _give_up(self, reason: str) -> None:
        if self.worker:
            self.worker.kill()
        self.worker = None
        lost, self.in_flight = list(self.in_flight.values()), {}
        for job in lost:
            job.deliver(Failure(job.name, reason))

    def stop_worker(self) -> None:
        """End the process (used when the pool closes)."""
        self.closing = True
        if self.worker:
            self.worker.process.kill()
