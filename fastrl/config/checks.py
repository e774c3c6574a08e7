"""Rules between keys: each looks at the whole configuration and names the keys it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastrl.config.schema import Config


@dataclass(frozen=True)
class Finding:
    """A broken rule. `keys` are the dotted keys it is about, the one to look at first in front."""

    keys: tuple[str, ...]
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Subject:
    """What a rule looks at: the configuration and the dotted keys that somebody wrote down."""

    config: Config
    set_keys: frozenset[str]


Rule = Callable[[Subject], Iterator[Finding]]


def check(config: Config, set_keys: frozenset[str]) -> list[Finding]:
    """Everything that the rules find in a configuration whose single values are right."""
    subject = Subject(config, set_keys)
    return [finding for rule in RULES for finding in rule(subject)]


def training_length(subject: Subject) -> Iterator[Finding]:
    """Exactly one of optim.total_steps and optim.total_epochs."""
    optim = subject.config.optim
    keys = ("optim.total_steps", "optim.total_epochs")
    if optim.total_steps is None and optim.total_epochs is None:
        yield Finding(keys, "optim.total_steps: how long to train? set optim.total_steps or optim.total_epochs")
    elif optim.total_steps is not None and optim.total_epochs is not None:
        text = f"optim.total_steps = {optim.total_steps} and optim.total_epochs = {optim.total_epochs:g} are both set: keep one (null unsets the other)"
        yield Finding(keys, text)


RULES: tuple[Rule, ...] = (training_length,)
