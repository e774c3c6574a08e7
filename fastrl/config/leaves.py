"""Every key of the configuration tree with its type, default, limits and description, in words."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fastrl.config.schema import Config

_LIMITS: dict[type, tuple[str, str]] = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
}
_PLURAL = {int: "integers", float: "numbers", str: "texts", bool: "true/false values"}
_SINGULAR = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Leaf:
    """One key: `name` is `section.key`, `limits` are texts like `>= 1`."""

    section: str
    key: str
    annotation: Any
    default: Any
    description: str
    limits: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values where the type is a fixed list of names (the items' ones for a list)."""
        return tuple(str(choice) for choice in _choices(self.annotation))

    @property
    def nullable(self) -> bool:
        return type(None) in typing.get_args(self.annotation)

    def accepts(self, kind: type) -> bool:
        """Whether the type is `kind`, or a union with it."""
        members = typing.get_args(self.annotation) if _is_union(self.annotation) else (self.annotation,)
        return any(member is kind or typing.get_origin(member) is kind for member in members)

    @property
    def type_text(self) -> str:
        """The type in words: `an integer >= 1, or null`."""
        members = [member for member in _members(self.annotation) if member is not type(None)]
        text = " or ".join(_type_words(member) for member in members)
        if self.limits:
            text += " " + " and ".join(self.limits)
        return text + (", or null" if self.nullable else "")


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _members(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if _is_union(annotation) else (annotation,)


def _choices(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        yield from typing.get_args(annotation)
    elif origin is not None:
        for member in typing.get_args(annotation):
            yield from _choices(member)


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is list:
        item = arguments[0]
        if typing.get_origin(item) is Literal:
            return "a list out of " + ", ".join(str(choice) for choice in typing.get_args(item))
        return f"a list of {_PLURAL[item]}"
    if origin is tuple:
        return f"a list of {len(arguments)} {_PLURAL[arguments[0]]}"
    if origin is dict:
        return "a mapping of names to values"
    return _SINGULAR[annotation]


def _limits(info: FieldInfo) -> Iterator[str]:
    for item in info.metadata:
        for kind, (sign, attribute) in _LIMITS.items():
            if isinstance(item, kind):
                yield f"{sign} {getattr(item, attribute)}"
        if isinstance(item, annotated_types.MinLen):
            yield f"with at least {item.min_length} item" + ("s" if item.min_length != 1 else "")


def _default(info: FieldInfo) -> Any:
    value = info.get_default(call_default_factory=True)
    return None if value is PydanticUndefined else value


@cache
def leaves() -> dict[str, Leaf]:
    """All keys by dotted name, in the order of the schema."""
    result = {}
    for section, section_info in Config.model_fields.items():
        for key, info in section_type(section_info).model_fields.items():
            leaf = Leaf(section, key, info.annotation, _default(info), info.description or "", tuple(_limits(info)))
            result[leaf.name] = leaf
    return result


def section_type(info: FieldInfo) -> Any:
    return info.annotation


@cache
def sections() -> dict[str, str]:
    """Section names with their descriptions."""
    return {name: info.description or "" for name, info in Config.model_fields.items()}
