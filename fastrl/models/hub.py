"""Whether the model hub can be asked at all, so that a machine without network says so at once."""

from __future__ import annotations

import functools
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants


@functools.cache
def hub_reachable() -> bool:
    """False when the hub's name cannot be resolved and no proxy would do that; asked once per process.

    The hub's client otherwise tries every file six times over most of a minute, also for models in the local cache.
    """
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def local_files_only(source_is_folder: bool) -> bool:
    """The argument of that name for `from_pretrained`: only the cache serves where the hub cannot be reached."""
    return not source_is_folder and not hub_reachable()
