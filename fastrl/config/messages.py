"""What is said about a value or a key that the schema refuses."""

from __future__ import annotations

from typing import Any

from pydantic_core import ErrorDetails

from fastrl.config.leaves import Leaf, leaves, sections
from fastrl.config.suggest import closest, did_you_mean, suggest_key
from fastrl.config.yaml_source import KeyPath


def unknown_key_text(path: KeyPath) -> str:
    """Why the key at `path` is refused and which one may have been meant."""
    if len(path) == 1:
        return _unknown_section_text(str(path[0]))
    section, key = str(path[0]), str(path[1])
    return "unknown key" + did_you_mean(suggest_key(section, key))


def _unknown_section_text(name: str) -> str:
    section, dot, key = name.partition(".")
    if dot and section in sections():
        return f"sections and keys are nested: write `{section}:` and under it `{key}:`"
    if near := closest(name, sections()):
        return f"unknown section; did you mean {near[0]}?"
    if options := suggest_key(None, name.split(".")[-1]):
        return "unknown section" + did_you_mean(options)
    return "unknown section; the sections are " + ", ".join(sections())


def describe_error(path: KeyPath, value: Any, detail: ErrorDetails) -> str:
    """What the value at `path` must be, and what it is."""
    leaf = leaves().get(".".join(str(part) for part in path[:2]))
    if leaf is None:
        if len(path) == 1:
            return f"a section holds keys, not {show(value)}; write them under it, one per line"
        return detail["msg"]
    item = "" if len(path) == 2 else "; this item is"
    if detail["type"] == "string_pattern_mismatch":
        return f"{show(value)} is not among what it may be: {leaf.description}"
    return f"must be {leaf.type_text}{item or ', not'} {show(value)}{_hint(leaf, path, value)}"


def show(value: Any) -> str:
    """A value as it would be written in YAML, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(leaf: Leaf, path: KeyPath, value: Any) -> str:
    if leaf.choices and isinstance(value, str) and (near := closest(value, leaf.choices, cutoff=0.5)):
        return f"; did you mean {near[0]}?"
    if isinstance(value, float) and value.is_integer() and leaf.accepts(int):
        return f"; write {int(value)}"
    if leaf.accepts(bool) and isinstance(value, str) and value.lower() in {"yes", "on", "no", "off", "1", "0"}:
        return f"; write {'true' if value.lower() in {'yes', 'on', '1'} else 'false'}"
    if leaf.accepts(str) and len(path) == 2 and isinstance(value, int | float):
        return f'; write "{value}"'
    if isinstance(value, str) and (leaf.accepts(float) or leaf.accepts(int)) and _is_number(value):
        return "; leave out the quotes"
    if leaf.accepts(list) and len(path) == 2 and not isinstance(value, list | dict) and value is not None:
        return f"; write [{value}]"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
