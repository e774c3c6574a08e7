"""What runs in a reward process: it imports the functions, then judges what comes down the pipe.

Started by `processes.py` with one end of a socket pair; nothing else is shared. A process serves either synchronous
functions, one call at a time on its main thread (so that signals work inside them), or coroutines, many at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from fastrl.errors import RewardError
from fastrl.rewards import builtin
from fastrl.rewards.base import Failure, check_batch_scores, check_score
from fastrl.rewards.processes import ELSEWHERE
from fastrl.rewards.signatures import (
    MissingColumn,
    Signature,
    batch_arguments,
    import_function,
    read_signature,
    sample_arguments,
)

HEARTBEAT_S = 0.5

# (name, function) of the built-in functions that need a process: (sample, settings) -> value
BUILTIN: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "math": lambda sample, settings: builtin.math(sample["response"], sample["answer"]),
    "reasoning_gym": lambda sample, settings: builtin.reasoning_gym(
        sample["response"], task=sample["extra"].get("reasoning_gym")
    ),
    "exact": lambda sample, settings: builtin.exact(
        sample["response"], sample["answer"], pattern=builtin.compile_pattern(settings["answer_pattern"])
    ),
    "regex": lambda sample, settings: builtin.regex(
        sample["response"], pattern=builtin.compile_pattern(settings["regex_pattern"])
    ),
}


def _never(payload: Any, settings: Any) -> None:
    raise AssertionError("this component is scored in the trainer's process")


class Judges:
    """The functions of this process, by index."""

    def __init__(self, specs: list[tuple[str, str]], settings: dict[str, Any]) -> None:
        self.settings = settings
        self.functions: list[tuple[str, Callable[..., Any], Signature | None]] = []
        for name, path in specs:
            if path == ELSEWHERE:
                self.functions.append((name, _never, None))
            elif path in BUILTIN:
                self.functions.append((name, BUILTIN[path], None))
            else:
                function = import_function(path)
                self.functions.append((name, function, read_signature(name, function)))

    def call(self, index: int, payload: Any) -> Any:
        """What the function returns for a sample (dict) or a batch (list of dicts); a coroutine where it is async."""
        _, function, signature = self.functions[index]
        if signature is None:
            return function(payload, self.settings)
        if signature.is_batch:
            return function(**batch_arguments(signature, payload))
        return function(**sample_arguments(signature, payload))

    def outcome(self, index: int, payload: Any, value: Any) -> Any:
        """The checked value: an outcome, or a list of them for a batch."""
        name = self.functions[index][0]
        if isinstance(payload, list):
            return check_batch_scores(name, value, len(payload))
        return check_score(name, value)

    def failure(self, index: int, error: BaseException) -> Failure:
        name = self.functions[index][0]
        if isinstance(error, RewardError):
            return Failure(name, str(error), is_contract=True)
        if isinstance(error, MissingColumn):
            return Failure(name, str(error))
        return Failure(name, f"{type(error).__name__}: {error}", traceback.format_exc())


def serve(connection: Connection, judges: Judges) -> None:
    """One call at a time on the main thread, until the other end closes."""
    while True:
        try:
            job_id, index, payload = connection.recv()
        except EOFError:
            return
        try:
            result = judges.outcome(index, payload, judges.call(index, payload))
        except Exception as error:
            result = judges.failure(index, error)
        connection.send((job_id, result))


async def serve_async(connection: Connection, judges: Judges, timeout_s: float, max_concurrency: int) -> None:
    """Many coroutines at a time, each within its own time limit; a heartbeat shows that the event loop turns."""
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(max_concurrency)
    closed = asyncio.Event()
    running: set[asyncio.Task[None]] = set()
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending, contextlib.suppress(OSError):
            connection.send(message)

    async def judge(job_id: int, index: int, payload: Any) -> None:
        async with slots:
            try:
                value = await asyncio.wait_for(judges.call(index, payload), timeout_s)
                result = judges.outcome(index, payload, value)
            except TimeoutError:
                result = Failure(judges.functions[index][0], f"timed out after {timeout_s:g} s")
            except Exception as error:
                result = judges.failure(index, error)
        send((job_id, result))

    def start(job: Any) -> None:
        task = loop.create_task(judge(*job))
        running.add(task)
        task.add_done_callback(running.discard)

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(start, connection.recv())
        loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=receive, daemon=True).start()
    while not closed.is_set():
        send((None, None))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closed.wait(), HEARTBEAT_S)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends, even inside a function that hangs."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(file_descriptor: int) -> None:
    """Run a reward process: first message is the set-up, the answer is the signatures or what went wrong."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle; it closes the pipe
    os.dup2(2, 1)  # what functions print must not mix with the trainer's own lines on stdout
    connection = Connection(file_descriptor)
    setup = connection.recv()
    try:
        judges = Judges(setup["functions"], setup["settings"])
    except BaseException as error:
        connection.send(("broken", f"{type(error).__name__}: {error}", traceback.format_exc()))
        return
    connection.send(("ready", [signature for _, _, signature in judges.functions]))
    if setup["is_async"]:
        asyncio.run(serve_async(connection, judges, setup["timeout_s"], setup["max_concurrency"]))
        os._exit(0)  # coroutines still running belong to nobody
    else:
        serve(connection, judges)


if __name__ == "__main__":
    main(int(sys.argv[1]))
