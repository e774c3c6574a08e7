"""Checks of option values against the type annotations of the function that takes them."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def check_value(value: Any, annotation: Any) -> Any:
    """The value as the annotated type: an int becomes a float where one is wanted, a list a tuple.

    Raises:
        ValueError: says what was expected.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, (str, typing.TypeVar)):
        return value
    if origin in (Union, types.UnionType):
        return check_union(value, arguments)
    if origin is Literal:
        if not any(type(a) is type(value) and a == value for a in arguments):
            choices = [str(a) for a in arguments]
            raise ValueError(f"must be one of {', '.join(choices)}{nearest(str(value), choices)}")
        return value
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return check_mapping(value, arguments)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return check_sequence(value, origin, arguments)
    return check_plain(value, annotation)


def check_plain(value: Any, wanted: Any) -> Any:
    """A bool, int, float, str or None, without Python's silent conversions between them."""
    if wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if wanted is int and isinstance(value, bool):
        raise ValueError("must be a whole number")
    if wanted in (None, type(None)):
        if value is None:
            return None
        raise ValueError("must be null")
    if not isinstance(wanted, type) or isinstance(value, wanted):
        return value
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    raise ValueError(f"must be {words.get(wanted, wanted.__name__)}")


def check_union(value: Any, choices: tuple[Any, ...]) -> Any:
    problems = []
    for choice in choices:
        try:
            return check_value(value, choice)
        except ValueError as error:
            problems.append(str(error).removeprefix("must be "))
    raise ValueError("must be " + " or ".join(problems))


def check_mapping(value: Any, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping (name: value)")
    key, item = arguments or (Any, Any)
    return {check_value(k, key): check_value(v, item) for k, v in value.items()}


def check_sequence(value: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError("must be a list")
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise ValueError(f"must be a list of {len(arguments)}")
        return tuple(check_value(v, a) for v, a in zip(value, arguments))
    item = arguments[0] if arguments else Any
    made = [check_value(v, item) for v in value]
    return tuple(made) if origin is tuple else made
