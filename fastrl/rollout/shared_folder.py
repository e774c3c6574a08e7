"""The private folder through which the processes of one tensor-parallel engine find each other.

Every start of the engine uses files of its own in it: `NAME-N`, where their process group is made (NAME is the folder's
own name), and `dead-N`, which one trainer process writes when its engine process has died, so that the others do not
wait for it in a collective. vLLM on a CPU names shared memory after `NAME-N`, and a killed process leaves it behind.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

PREFIX = "fastrl-tp-"
SHARED_MEMORY = Path("/dev/shm")


class SharedFolder:
    """Args:
    path: of an existing folder, made by another process; None makes one (0700), to be removed by this process.
    """

    def __init__(self, path: str | None = None) -> None:
        self.owned = path is None
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX) if path is None else path)

    def rendezvous(self, number: int) -> str:
        """Where the processes of start `number` (0, 1, ...) make their group."""
        return f"file://{self.path / f'{self.path.name}-{number}'}"

    def mark(self, number: int) -> Path:
        """The file that says that a process of start `number` is dead."""
        return self.path / f"dead-{number}"

    def close(self) -> None:
        """Remove the folder and the shared memory named after it, if they are this process's."""
        if self.owned:
            remove_shared(self.rendezvous(0))


def remove_shared(rendezvous: str) -> None:
    """Remove the folder of a rendezvous and all shared memory named after it."""
    folder = Path(rendezvous.removeprefix("file://")).parent
    if not folder.name.startswith(PREFIX):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if SHARED_MEMORY.is_dir():
        for path in SHARED_MEMORY.glob(f"{folder.name}-*"):
            path.unlink(missing_ok=True)
