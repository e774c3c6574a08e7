"""YAML with positions: what a file says, where it says it, and text that reads back equal.

Reading follows the YAML 1.2 core rules, so `1e-6` is a number and `on`, `yes`, `12:30` are text. Nothing but plain data
is ever built (no tags that construct objects).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Source:
    """Where something was written: a file with a 1-based line and column, or the n-th override (column n, no line)."""

    name: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Spot:
    """The positions of a key and of its value."""

    key: Source
    value: Source


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the configuration: `key` is the dotted key it is about, `related` others that were meant."""

    source: Source
    text: str
    key: str | None = None
    related: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}: {self.key}: {self.text}" if self.key else f"{self.source}: {self.text}"


class CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2 (underscores in numbers stay allowed)."""


class CoreDumper(yaml.SafeDumper):
    """SafeDumper that quotes every text that either version of YAML would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_INT = re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_CORE_RULES: list[tuple[str, re.Pattern[str], str]] = [
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+.0123456789"),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), "<"),
]


def _install_rules() -> None:
    CoreLoader.yaml_implicit_resolvers = {}
    for tag, pattern, first in _CORE_RULES:
        letters = [letter if letter != "\0" else "" for letter in first]
        CoreLoader.add_implicit_resolver(tag, pattern, letters)
        CoreDumper.add_implicit_resolver(tag, pattern, letters)


def _construct_int(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base)


def _construct_float(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_install_rules()
CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


class _Reader:
    """Turns one document into plain data, noting the position of every key, value and list item."""

    def __init__(self, loader: CoreLoader, name: str) -> None:
        self.loader = loader
        self.name = name
        self.spots: dict[KeyPath, Spot] = {}
        self.problems: list[Problem] = []
        self._open: list[yaml.Node] = []

    def _source(self, mark: yaml.Mark) -> Source:
        return Source(self.name, mark.line + 1, mark.column + 1)

    def _complain(self, mark: yaml.Mark, text: str) -> None:
        self.problems.append(Problem(self._source(mark), text))

    def read(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        if node in self._open:
            self._complain(node.start_mark, "this alias refers to the value it stands in")
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
                return self._read_mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
                return self._read_sequence(node, path)
            return self.loader.construct_object(node)
        except yaml.constructor.ConstructorError as error:
            self._complain(node.start_mark, f"{error.problem or error}; only plain data is read")
            return None
        except ValueError as error:
            self._complain(node.start_mark, str(error))
            return None
        finally:
            self._open.pop()

    def _read_sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            source = self._source(item.start_mark)
            self.spots[(*path, index)] = Spot(source, source)
            items.append(self.read(item, (*path, index)))
        return items

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._refuse_duplicates(node)
        self.loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.read(key_node)
            if not isinstance(key, str):
                self._complain(key_node.start_mark, f"keys are names, not {key!r}")
                continue
            self.spots[(*path, key)] = Spot(self._source(key_node.start_mark), self._source(value_node.start_mark))
            result[key] = self.read(value_node, (*path, key))
        return result

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        first: dict[str, yaml.Node] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in first:
                line = first[key_node.value].start_mark.line + 1
                self._complain(key_node.start_mark, f"{key_node.value}: written twice, first on line {line}; keep one")
            first.setdefault(key_node.value, key_node)


@dataclass
class Document:
    """The content of one file or one override: plain data, positions by path, and what was wrong with it."""

    name: str
    data: dict[str, Any]
    spots: dict[KeyPath, Spot]
    problems: list[Problem]
    readable: bool = True


def _syntax_problem(error: yaml.YAMLError, text: str, name: str) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(Source(name), f"not readable as YAML: {error}")
    mark = error.problem_mark
    source = Source(name, mark.line + 1, mark.column + 1)
    problem = error.problem or ""
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\\t" in problem or "\t" in line[: mark.column + 1]:
        return Problem(source, "a tab; YAML indents with spaces only")
    if isinstance(error, yaml.composer.ComposerError) and "single document" in (error.context or ""):
        return Problem(source, "a second document starts here; a configuration is one document")
    where = f" ({error.context})" if error.context else ""
    return Problem(source, f"not readable as YAML: {problem}{where}")


def _read_text(path: str) -> str | Problem:
    name = Source(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return Problem(name, _missing_file_text(Path(path)))
    except IsADirectoryError:
        return Problem(name, "is a folder; give a YAML file")
    except UnicodeDecodeError as error:
        return Problem(name, f"is not UTF-8 text (byte {error.start})")
    except OSError as error:
        return Problem(name, f"cannot be read: {error.strerror}")


def _missing_file_text(path: Path) -> str:
    from fastrl.config.suggest import closest

    folder = path.parent
    near: list[str] = []
    if folder.is_dir():
        near = closest(path.name, [entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"}])
    elif not folder.exists():
        return f"no such file (there is no folder {folder} in {Path.cwd()})"
    hint = f"; did you mean {folder / near[0]}?" if near else f" (looked from {Path.cwd()})"
    return f"no such file{hint}"


def read_document(path: str) -> Document:
    """Read one configuration file. Never raises for what the file contains: problems are in the result."""
    text = _read_text(path)
    if isinstance(text, Problem):
        return Document(path, {}, {}, [text], readable=False)
    loader: CoreLoader | None = None
    try:
        loader = CoreLoader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        return Document(path, {}, {}, [_syntax_problem(error, text, path)], readable=False)
    finally:
        if loader is not None:
            loader.dispose()
    if node is None:
        empty = Problem(Source(path), "is empty; a configuration has sections such as `optim:` with keys under them")
        return Document(path, {}, {}, [empty], readable=False)
    reader = _Reader(loader, path)
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        problem = Problem(
            Source(path, node.start_mark.line + 1, node.start_mark.column + 1),
            f"the file holds {kind}; a configuration has sections such as `optim:` with keys under them",
        )
        return Document(path, {}, {}, [problem], readable=False)
    data = reader.read(node)
    return Document(path, data, reader.spots, reader.problems)


def parse_value(text: str) -> Any:
    """Read the value of an override as YAML; text that is not valid YAML stands for itself."""
    try:
        loader = CoreLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError):
        return text


def to_yaml(data: Any) -> str:
    """YAML text that `read_document` reads back equal."""
    no_folding = 2**31
    return yaml.dump(data, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=no_folding)


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every scalar of nested mappings and lists, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))
    else:
        yield path, value
