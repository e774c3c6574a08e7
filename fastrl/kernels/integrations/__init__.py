"""Drop-in adapters for other trainers: their own functions, same signatures and numbers, computed by `fastrl.kernels`.

    from fastrl.kernels.integrations import verl      # or trl, openrlhf
    restore = verl.install()                          # replaces that trainer's functions in this process
    restore()                                         # puts the originals back

The functions of each module can also be imported and called one by one. Nothing of the other trainer is imported before
`install()`. Where an argument asks for something that the kernels do not do, the call is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any


def replace_everywhere(root: str, pairs: Iterable[tuple[Any, Any]]) -> Callable[[], None]:
    """Replace module attributes that *are* the originals, in every loaded module of package `root`.

    Args:
        root: top-level package name, for example "verl".
        pairs: (original, replacement) objects.

    Returns:
        a function that puts the originals back.
    """
    swapped: list[tuple[ModuleType, str, Any]] = []
    table = {id(original): replacement for original, replacement in pairs}
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] != root:
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in table:
                swapped.append((module, attribute, value))
                setattr(module, attribute, table[id(value)])

    def restore() -> None:
        for module, attribute, value in swapped:
            setattr(module, attribute, value)

    return restore
