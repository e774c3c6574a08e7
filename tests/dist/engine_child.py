"""A stand-in engine in a forked process, for tests of the weight delivery."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Child:
    """A forked process that runs `body` and keeps its result; `body` must not call backward."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.output = Path(self.folder.name, "result")
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                outcome = ("ok", body())
            except BaseException as error:
                outcome = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            with contextlib.suppress(BaseException):
                self.output.write_bytes(pickle.dumps(outcome))
            os._exit(0)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.status = status
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.status = -1
                raise AssertionError(f"the child did not end within {timeout_s} s")
            else:
                time.sleep(0.005)

    def outcome(self, timeout_s: float = 60.0) -> tuple[str, Any]:
        """("ok", result) or ("error", text)."""
        self.wait(timeout_s)
        return pickle.loads(self.output.read_bytes())

    def result(self, timeout_s: float = 60.0) -> Any:
        """Its result; fails the test with its error."""
        kind, value = self.outcome(timeout_s)
        assert kind == "ok", value
        return value
