"""From files and `key=value` arguments to a checked `Config`: compose, validate, and report everything wrong at once.

Files compose left to right, then come the overrides. Mappings merge key by key, an empty mapping `{}` clears what an
option mapping held, everything else (lists too) replaces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fastrl.config import checks
from fastrl.config.leaves import leaves, sections
from fastrl.config.messages import describe_error, unknown_key_text
from fastrl.config.schema import Config
from fastrl.config.suggest import suggest_key
from fastrl.config.yaml_source import (
    COMMAND_LINE,
    Document,
    KeyPath,
    Problem,
    Source,
    Spot,
    parse_value,
    read_document,
    to_yaml,
    walk,
)
from fastrl.errors import ConfigError


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and where each of its values was written.

    `spots` holds the positions of the keys that were set, by path (`("optim", "lr")`); `warnings` are finished lines to
    show before training.
    """

    config: Config
    spots: dict[KeyPath, Spot]
    files: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def is_set(self, key: str) -> bool:
        """Whether `section.key` was written in a file or on the command line."""
        return tuple(key.split(".")) in self.spots

    def source(self, key: str) -> str:
        """Where `section.key` got its value: `file:line:column`, `command line` or `default`."""
        spot = self.spots.get(tuple(key.split(".")))
        return str(spot.value) if spot else "default"


def load_config(
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    cross_check: bool = True,
    only_look: bool = False,
) -> LoadedConfig:
    """Compose files and overrides into a checked configuration.

    Args:
        paths: YAML files, later ones win; none at all gives the defaults.
        overrides: `section.key=value` texts, later ones win; values are read as YAML.
        cross_check: also apply the rules between keys and look for the files and functions that are named.
        only_look: a package that is missing here is a warning, not an error (the run may be for another machine).

    Returns:
        The configuration, the position of every value that was set, and the warnings.

    Raises:
        ConfigError: with every problem found, one per line, and a closing line that counts them.
    """
    documents = [read_document(str(path)) for path in paths]
    documents += [_read_override(text, number) for number, text in enumerate(overrides)]
    data, spots = _compose(documents)
    problems = [problem for document in documents for problem in document.problems]
    config, found = _validate(data, spots)
    problems += found
    warnings: list[str] = []
    if cross_check and all(document.readable for document in documents):
        for finding in checks.check(config, _changed_keys(config, spots)):
            if not _spoiled(finding.keys, problems):
                problem = Problem(_finding_source(finding.keys, spots, paths), finding.text)
                if finding.kind == "warning" or (finding.kind == "missing_package" and only_look):
                    warnings.append(str(problem))
                else:
                    problems.append(problem)
    if problems:
        raise ConfigError(_report(problems))
    return LoadedConfig(config, spots, tuple(str(path) for path in paths), tuple(warnings))


def dump_config(config: Config) -> str:
    """The whole configuration, defaults included, as YAML text that loads equal."""
    return to_yaml(config.model_dump(mode="json"))


def _read_override(text: str, number: int) -> Document:
    source = Source(COMMAND_LINE, column=number)
    name, equals, value_text = text.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path) or len(path) < 2:
        problem = Problem(source, f"{text}: an override is written section.key=value, as in optim.lr=1e-5")
        return Document(COMMAND_LINE, {}, {}, [problem])
    value = _override_value(path, value_text)
    spots: dict[KeyPath, Spot] = {path[: depth + 1]: Spot(source, source) for depth in range(len(path))}
    data: Any = value
    for key in reversed(path):
        data = {key: data}
    return Document(COMMAND_LINE, data, spots, [])


def _override_value(path: tuple[str, ...], text: str) -> Any:
    """The value as YAML reads it; a key that takes text gets the text (the shell has removed the quotes)."""
    value = parse_value(text)
    leaf = leaves().get(".".join(path))
    if leaf is None or value is None or not leaf.accepts(str):
        return value
    fits = isinstance(value, str) or (isinstance(value, list) and leaf.accepts(list))
    return value if fits else text


def _compose(documents: Iterable[Document]) -> tuple[dict[str, Any], dict[KeyPath, Spot]]:
    data: dict[str, Any] = {}
    spots: dict[KeyPath, Spot] = {}
    for document in documents:
        content = {name: {} if value is None and name in sections() else value for name, value in document.data.items()}
        _merge(data, content, (), spots, document.spots)
    return data, spots


def _merge(
    base: dict[str, Any], new: dict[str, Any], path: KeyPath, spots: dict[KeyPath, Spot], new_spots: dict[KeyPath, Spot]
) -> None:
    for key, value in new.items():
        here = (*path, key)
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and (value or not path):
            if value:
                _merge(old, value, here, spots, new_spots)
        else:
            base[key] = value
            for stale in [known for known in spots if known[: len(here)] == here]:
                del spots[stale]
            spots.update({known: spot for known, spot in new_spots.items() if known[: len(here)] == here})
        if here in new_spots:
            spots[here] = new_spots[here]


def _changed_keys(config: Config, spots: dict[KeyPath, Spot]) -> frozenset[str]:
    """Keys that were written with another value than their default; a written default asks for nothing."""
    values = config.model_dump()
    known = leaves()
    names = {f"{path[0]}.{path[1]}" for path in spots if len(path) >= 2}
    return frozenset(name for name in names if name in known and _value(values, name) != known[name].default)


def _value(values: dict[str, Any], name: str) -> Any:
    section, key = name.split(".")
    return values[section][key]


def _validate(data: dict[str, Any], spots: dict[KeyPath, Spot]) -> tuple[Config, list[Problem]]:
    """The configuration without its wrong values (their defaults instead), and what was wrong with them."""
    problems = [
        _problem(path, "must be a finite number", spots)
        for path, value in walk(data)
        if isinstance(value, float) and not math.isfinite(value)
    ]
    for path in [path for path, value in walk(data) if isinstance(value, float) and not math.isfinite(value)]:
        _remove(data, path[:2])
    while True:
        try:
            return Config.model_validate_json(json.dumps(data), strict=True), problems
        except ValidationError as error:
            details = error.errors(include_url=False)
        wrong = {_known_part(detail, data): detail for detail in reversed(details)}
        # A union reports the whole value and the item inside it: the item says more.
        inner = [
            path for path in reversed(wrong) if not any(len(p) > len(path) and p[: len(path)] == path for p in wrong)
        ]
        problems += [_validation_problem(path, wrong[path], data, spots) for path in inner]
        for path in inner:
            _remove(data, path if path and path[0] not in sections() else path[:2])


def _known_part(detail: ErrorDetails, data: Any) -> KeyPath:
    """The part of an error's location that exists in the data (unions add the names of their members)."""
    path: KeyPath = ()
    for part in detail["loc"]:
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, dict) and part in data):
            data = data[part]
            path = (*path, part)
    return path


def _validation_problem(path: KeyPath, detail: ErrorDetails, data: Any, spots: dict[KeyPath, Spot]) -> Problem:
    value = data
    for part in path:
        value = value[part]
    if detail["type"] == "extra_forbidden":
        related = suggest_key(str(path[0]), str(path[-1]))
        return replace(_problem(path, unknown_key_text(path), spots, at_key=True), related=related)
    return _problem(path, describe_error(path, value, detail), spots)


def _problem(path: KeyPath, text: str, spots: dict[KeyPath, Spot], *, at_key: bool = False) -> Problem:
    known = path
    while known and known not in spots:
        known = known[:-1]
    spot = spots.get(known)
    source = (spot.key if at_key else spot.value) if spot else Source("defaults")
    key = ""
    for part in path:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    return Problem(source, text, key)


def _remove(data: dict[str, Any], path: KeyPath) -> None:
    holder: Any = data
    for part in path[:-1]:
        holder = holder[part] if isinstance(holder, dict) and part in holder else {}
    if path and isinstance(holder, dict):
        holder.pop(path[-1], None)


def _spoiled(keys: Sequence[str], problems: Sequence[Problem]) -> bool:
    """Whether a rule about `keys` says nothing, because one of them is already known to be wrong."""
    for problem in problems:
        about = [name.split("[")[0] for name in (problem.key or "", *problem.related) if name]
        if any(key.split("[")[0] == name or key.startswith(f"{name}.") for key in keys for name in about):
            return True
    return False


def _finding_source(keys: Sequence[str], spots: dict[KeyPath, Spot], paths: Sequence[str | Path]) -> Source:
    for key in keys:
        name, _, item = key.partition("[")
        path: KeyPath = (*name.split("."), *([int(item[:-1])] if item else []))
        if spot := spots.get(path) or spots.get(path[:2]):
            return spot.value
    return Source(str(paths[-1])) if paths else Source("defaults")


def _report(problems: Sequence[Problem]) -> str:
    """All problems in the order of files and lines, and the closing line."""
    order: dict[str, int] = {}
    for problem in problems:
        order.setdefault(problem.source.name, len(order))
    ranked = sorted(
        problems,
        key=lambda p: (p.source.name == COMMAND_LINE, order[p.source.name], p.source.line or 0, p.source.column or 0),
    )
    lines = list(dict.fromkeys(str(problem) for problem in ranked))
    files = {problem.source.name for problem in problems} - {COMMAND_LINE}
    places = []
    if files:
        places.append(f"in {_count(len(files), 'file')}")
    if any(problem.source.name == COMMAND_LINE for problem in problems):
        places.append("on the command line")
    closing = f"{_count(len(lines), 'error')} {' and '.join(places)}."
    if key := _key_to_explain(ranked):
        closing += f" `fastrl config --explain {key}` tells more."
    return "\n".join([*lines, closing])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _key_to_explain(problems: Sequence[Problem]) -> str | None:
    """The first known key that the problems are about, a suggested one included."""
    for problem in problems:
        for word in f"{problem.key or ''} {problem.text}".replace(",", " ").replace("?", " ").replace(":", " ").split():
            key = ".".join(word.split("[")[0].split(".")[:2])
            if key in leaves():
                return key
    return None
