"""What a rule between keys is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fastrl.config.schema import Config

Kind = Literal["error", "warning", "missing_package"]


@dataclass(frozen=True)
class Finding:
    """A broken rule. `keys` are the dotted keys it is about, the one to look at first in front.

    `missing_package` is an error where training starts and a warning where a configuration is only looked at, perhaps
    on another machine than the one it is for.
    """

    keys: tuple[str, ...]
    text: str
    kind: Kind = "error"


@dataclass(frozen=True)
class Subject:
    """What a rule looks at: the configuration and the dotted keys that somebody wrote down."""

    config: Config
    set_keys: frozenset[str]

    def first_set(self, prefix: str) -> str | None:
        """The first written key below `prefix.`, in alphabetical order."""
        return min((key for key in self.set_keys if key.startswith(f"{prefix}.")), default=None)


Rule = Callable[[Subject], Iterator[Finding]]


def error(*keys: str, text: str) -> Finding:
    """A combination that cannot work."""
    return Finding(keys, text)


def warning(*keys: str, text: str) -> Finding:
    """A combination that works, but hardly as meant."""
    return Finding(keys, text, "warning")


def no_effect(key: str, why: str) -> Finding:
    """A key that somebody wrote and that nothing reads."""
    return warning(key, text=f"{key} has no effect: {why}")
