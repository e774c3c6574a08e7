"""The private line between a trainer process and its engine process: a Unix socket that carries small JSON messages.

Each message is a length (4 bytes, big endian) and JSON; file descriptors travel beside one where shared memory is
handed over. The socket lies in a folder that only its owner can enter, and the first message must bring the run's token.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import shutil
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastrl.errors import WeightError

PREFIX = "fastrl-weights-"
SOCKET = "line"
MAX_PATH = 107  # bytes of a Unix socket's path on Linux, without the final zero
MAX_MESSAGE = 1 << 28
_LENGTH = struct.Struct("!I")
_FOLDER = re.compile(re.escape(PREFIX) + r"(\d+)-\w+")


class LineClosed(WeightError):
    """The process on the other end is gone or has closed the line."""


class Line:
    """One connected end. Every wait has a deadline; a peer that died is noticed at once."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection, self.peer = connection, peer

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message, with open file descriptors beside it."""
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            self.connection.settimeout(None)
            self.connection.sendall(_LENGTH.pack(len(body)) + body)
            if descriptors:
                socket.send_fds(self.connection, [b"d"], list(descriptors))
        except OSError as error:
            raise LineClosed(f"{self.peer} is gone ({error.strerror or error})") from error

    def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """The next message; None waits for ever.

        Raises:
            LineClosed: the peer is gone.
            WeightError: nothing came in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > MAX_MESSAGE:
            raise WeightError(f"{self.peer} announced a message of {length} bytes: it does not speak this protocol")
        message = json.loads(self._read(length, deadline))
        if not isinstance(message, dict):
            raise WeightError(f"{self.peer} sent {type(message).__name__}: it does not speak this protocol")
        return message

    def receive_descriptors(self, number: int, timeout_s: float) -> list[int]:
        """The file descriptors that follow a message."""
        self.connection.settimeout(timeout_s)
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, 1, number)
        except OSError as error:
            raise LineClosed(f"{self.peer} is gone ({error.strerror or error})") from error
        if data != b"d" or len(descriptors) != number:
            raise WeightError(f"{self.peer} sent {len(descriptors)} of {number} memory handles")
        return descriptors

    def _read(self, size: int, deadline: float | None) -> bytes:
        parts, missing = [], size
        while missing:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WeightError(f"{self.peer} did not answer in time")
            self.connection.settimeout(left)
            try:
                data = self.connection.recv(min(missing, 1 << 20))
            except TimeoutError:
                continue
            except OSError as error:
                raise LineClosed(f"{self.peer} is gone ({error.strerror or error})") from error
            if not data:
                raise LineClosed(f"{self.peer} is gone")
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def hang_up(self, patience_s: float) -> None:
        """Say that nothing more comes, and wait a while for the peer to close its end."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(patience_s)
            while self.connection.recv(1 << 16):
                pass
        self.close()

    def close(self) -> None:
        """Close this end; the peer notices."""
        self.connection.close()


class Door:
    """The listening side: a private folder with one socket, an address and a token.

    Args:
        folder: where the private folder is made; None takes the system's temporary folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        base = Path(folder or tempfile.gettempdir())
        sweep(base)
        # the owner's pid in the name lets a later run recognise what a killed one left
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))  # mode 0700
        self.address = str(self.folder / SOCKET)
        self.token = secrets.token_hex(16)
        self._remove = weakref.finalize(self, remove_own, self.folder, os.getpid())  # at the latest when Python ends
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self.address) as path:
            self.socket.bind(path)
        self.socket.listen(64)

    def accept(self, timeout_s: float, who: str = "the engine process") -> tuple[Line, dict[str, Any]]:
        """The next peer that knows the token, with its first message; others are turned away."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WeightError(f"{who} did not connect to {self.address} within {timeout_s:g} s")
            self.socket.settimeout(left)
            try:
                connection, _ = self.socket.accept()
            except TimeoutError:
                continue
            line = Line(connection, who)
            with contextlib.suppress(WeightError, ValueError):
                hello = line.receive(min(left, 10.0))
                if hmac.compare_digest(str(hello.get("token", "")), self.token):
                    return line, hello
                line.send({"kind": "stop", "why": "the token is not this run's"})
            line.close()

    def close(self) -> None:
        """Close and remove the socket and its folder; only the process that made them does."""
        self.socket.close()
        self._remove()


def remove_own(folder: Path, owner: int) -> None:
    """Remove a folder of this process; a forked copy of it leaves the folder alone."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def connect(address: str, token: str, hello: dict[str, Any], who: str = "the trainer") -> Line:
    """Connect to a door and introduce oneself.

    Raises:
        WeightError: there is no such socket, or nobody listens any more (its folder is removed then).
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(address) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):
            remove_abandoned(address)
        raise WeightError(f"{who} does not listen on {address} ({error.strerror or error})") from error
    line = Line(connection, who)
    line.send({**hello, "token": token})
    return line


@contextlib.contextmanager
def short_path(address: str) -> Iterator[str]:
    """A path to the socket that the kernel accepts: long ones go through the open folder's entry in /proc."""
    if len(os.fsencode(address)) <= MAX_PATH:
        yield address
        return
    folder, name = os.path.split(address)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise WeightError(f"cannot open {folder} ({error.strerror})") from error
    try:
        short = f"/proc/self/fd/{descriptor}"
        if not os.path.isdir(short):
            raise WeightError(
                f"the socket path {address} has {len(os.fsencode(address))} bytes and {MAX_PATH} are allowed: "
                "set TMPDIR to a shorter folder"
            )
        yield f"{short}/{name}"
    finally:
        os.close(descriptor)


def remove_abandoned(address: str, patience_s: float = 0.5) -> None:
    """Remove the private folder behind `address` once nobody listens there: a killed owner cannot do it."""
    folder, deadline = Path(address).parent, time.monotonic() + patience_s
    if not _FOLDER.fullmatch(folder.name):
        return
    while _listens(folder):
        # the kernel closes a dead process's sockets one after the other
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path) -> list[str]:
    """Remove private folders of this user whose owner is dead; returns their names."""
    removed = []
    for path in base.glob(f"{PREFIX}*"):
        found = _FOLDER.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if found and path.stat().st_uid == os.getuid() and not _runs(int(found[1])) and not _listens(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path.name)
    return removed


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _listens(folder: Path) -> bool:
    """Whether somebody serves the socket: a process of another container has no pid here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, short_path(str(folder / SOCKET)) as path:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
