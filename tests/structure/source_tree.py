"""The source files of the package as text and syntax trees, for the tests of the house's structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "fastrl"


@dataclass(frozen=True)
class Source:
    """One file. `name` is its path from the repository's root."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(REPOSITORY).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    def imports(self) -> set[str]:
        """Every module that is imported anywhere in the file, lazily too."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module)
        return found

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def sources(room: str = "") -> list[Source]:
    """The files of the package, or of one of its rooms."""
    return [Source(path) for path in sorted((PACKAGE / room).rglob("*.py"))]
