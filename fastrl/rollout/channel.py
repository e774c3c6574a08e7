"""Messages between a trainer and its engine process: JSON over a pair of connected Unix sockets.

The pair is made before the child starts and one end is handed to it, so there is no path, no port and no token that
somebody else could use. When one side ends, the other reads the end of the stream.
"""

from __future__ import annotations

import json
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end. Any thread may send, one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """The end that was handed over as an open file descriptor."""
        return cls(Connection(descriptor))

    def send(self, message: dict[str, Any]) -> None:
        """Raises ChannelClosed when nobody is left to read it."""
        data = json.dumps(message, separators=(",", ":")).encode()
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message, None when there is none within `timeout_s` seconds. Raises ChannelClosed at the end."""
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                return None
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
            return message
        except (EOFError, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """This side's end, and the socket whose descriptor is for the child."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel.from_descriptor(ours.detach()), theirs
