"""How a user's function is called: which of a sample's fields its parameters name, one sample or a batch at a time.

    def reward(prompt, response, answer, **extra) -> float | None: ...
    def reward(prompts, responses, answers, **extra) -> list[float | None]: ...

A function with a parameter named like a list (`responses`, `prompts`, ...) judges a batch; any other one sample. Each
may be `async`. Parameters are filled by name: a field below, its plural, an alias, or a column of the data.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = (
    "prompt",  # the question: text, or the last user message
    "messages",  # the chat messages, or None
    "response",  # text of the sampled tokens
    "answer",  # reference answer
    "data_source",
    "finish_reason",  # stop | length | abort
    "response_ids",
    "num_tokens",  # sampled tokens
    "prompt_id",
    "sample_id",
    "extra",  # dict of all other columns
)
PLURALS = {name: f"{name}s" for name in FIELDS if not name.endswith("s") and name != "extra"}
ALIASES = {"completion": "response", "solution_str": "response", "ground_truth": "answer"}
BATCH_NAMES = {plural: name for name, plural in PLURALS.items()} | {
    "completions": "response",
    "solution_strs": "response",
    "ground_truths": "answer",
}


@dataclass(frozen=True)
class Signature:
    """How to call one function."""

    name: str
    parameters: tuple[str, ...]  # names to fill, those with defaults included
    required: tuple[str, ...]
    takes_columns: bool  # has **keyword: gets every other column
    is_batch: bool
    is_async: bool


def import_function(path: str) -> Callable[..., Any]:
    """The object at `package.module:name` (dots allowed after the colon); a class is instantiated once.

    Raises:
        ValueError, ImportError, AttributeError, TypeError: it cannot be had; the message says why.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{path!r} is not of the form package.module:function")
    if module_name == "__main__":
        raise ValueError("functions of __main__ cannot be imported by the reward processes: put it in a module")
    found: Any = importlib.import_module(module_name)
    for part in name.split("."):
        found = getattr(found, part)
    if inspect.isclass(found):
        found = found()
    if not callable(found):
        raise TypeError(f"{path} is a {type(found).__name__}, which cannot be called")
    return found


def read_signature(name: str, function: Callable[..., Any]) -> Signature:
    """How to call the function, from its parameter names.

    Raises:
        TypeError: it takes positional-only parameters or *args, or nothing of the response.
    """
    kinds = inspect.Parameter
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL) for p in parameters):
        raise TypeError("parameters are filled by name: no positional-only parameters and no *args")
    named = [p for p in parameters if p.kind != kinds.VAR_KEYWORD]
    names = tuple(p.name for p in named)
    is_batch = any(n in BATCH_NAMES for n in names)
    if not named:
        raise TypeError("takes no named parameter; name at least `response` (one sample) or `responses` (a batch)")
    call = getattr(function, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
    return Signature(
        name=name,
        parameters=names,
        required=tuple(p.name for p in named if p.default is kinds.empty),
        takes_columns=len(named) < len(parameters),
        is_batch=is_batch,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
    )


class MissingColumn(TypeError):
    """A parameter without default that this sample has nothing for; the message says what there is."""


def sample_arguments(signature: Signature, sample: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for one sample.

    Args:
        sample: FIELDS -> value.

    Raises:
        TypeError: a required parameter names neither a field nor a column of this row.
    """
    columns = sample["extra"]
    arguments = {}
    for name in signature.parameters:
        key = ALIASES.get(name, name)
        if key in sample:
            arguments[name] = sample[key]
        elif name in columns:
            arguments[name] = columns[name]
        elif name in signature.required:
            raise MissingColumn(_unknown_parameter(name, columns))
    if signature.takes_columns:
        arguments |= {k: v for k, v in columns.items() if k not in arguments}
    return arguments


def batch_arguments(signature: Signature, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Keyword arguments for a batch: lists with one entry per sample; a column that a row lacks is None there."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample["extra"]))
    arguments = {}
    for name in signature.parameters:
        key = BATCH_NAMES.get(name, ALIASES.get(name, name))
        if samples and key in samples[0]:
            arguments[name] = [sample[key] for sample in samples]
        elif name in columns:
            arguments[name] = [sample["extra"].get(name) for sample in samples]
        elif name in signature.required:
            raise MissingColumn(_unknown_parameter(name, columns))
    if signature.takes_columns:
        arguments |= {c: [s["extra"].get(c) for s in samples] for c in columns if c not in arguments}
    return arguments


def _unknown_parameter(name: str, columns: Any) -> str:
    known = ", ".join([*FIELDS, *columns])
    return f"parameter {name!r} is neither a field of the sample nor a column of the data ({known})"
