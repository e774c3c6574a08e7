"""Test files run in Triton's interpreter, each run in a process of its own, one after another in the background."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
Files = tuple[str, ...]


class Background:
    """A queue of runs and the process that is running now."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self.futures: dict[Files, Future] = {}
        self.process: subprocess.Popen | None = None

    def start(self, files: Files) -> Future:
        """Queue a run, once."""
        if files not in self.futures:
            self.pool = self.pool or ThreadPoolExecutor(1)
            self.futures[files] = self.pool.submit(self._run, files)
        return self.futures[files]

    def _run(self, files: Files) -> subprocess.CompletedProcess:
        environment = os.environ | {"TRITON_INTERPRET": "1", "FASTRL_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-m", "not slow", "-W", "ignore", "-p", "no:cacheprovider", *files]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=HERE, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            self.process = process
            out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def stop(self) -> None:
        """Give up what has not finished."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


background = Background()


def result_of(files: Files) -> subprocess.CompletedProcess:
    """The finished run of these files, started now unless it was before."""
    return background.start(files).result()
