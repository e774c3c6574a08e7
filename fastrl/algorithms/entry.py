"""What is known about one registered algorithm, read off the signature of its function.

Positional parameters name the data it takes (`scores, group_id, valid, ...`), keyword-only parameters are its options.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

REQUIRED = inspect.Parameter.empty  # the default of an option that must be given


@dataclass(frozen=True)
class Entry:
    """A registered algorithm. `data` are the positional parameters, `options` the keyword-only ones."""

    kind: str  # advantage | policy_loss | correction | kl
    name: str
    fn: Callable[..., Any]
    level: str  # token | sequence | batch: what one value of the result belongs to
    needs: frozenset[str] = frozenset()  # passes and fields that the trainer must provide
    whiten: bool = False  # advantages only: the trainer whitens the result over response_mask
    data: tuple[str, ...] = ()
    optional_data: frozenset[str] = frozenset()  # those of `data` that may be absent
    options: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # name -> (annotation, default)
    preset: dict[str, Any] = field(default_factory=dict)  # option values that the name stands for
    select: Callable[..., Any] | None = None  # batch-level losses: makes the selection mask [T]
    loss_agg_mode: str = "token-mean"  # policy losses only: the aggregation the paper uses
    only_loss_agg_modes: tuple[str, ...] = ()  # aggregation modes the loss is defined for; () is any
    more_needs: Callable[..., Iterable[str]] | None = None  # called with the options, names further needs
    check: Callable[..., str | None] | None = None  # called with the options, says what is wrong with their values
    summary: str = ""  # first sentence of the docstring

    @property
    def whole_groups(self) -> bool:
        """Advantages only: reads tokens of one group together, so that a group must be on one rank."""
        return self.kind == "advantage" and self.level != "sequence" and "group_id" in self.data

    def call(self, data: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Any:
        """The function's result on the fields of `data` that it takes and the given options.

        What a loss mask (in `data`) hides from a policy loss is replaced by 0 first, so that NaN there changes nothing.

        Raises:
            KeyError: a field that the function cannot do without is missing or None; the message names it.
        """
        if self.kind == "policy_loss":
            data = hidden(data, self.fn)
        return self.fn(*take(self, self.fn, data), **self.own(self.fn, options))

    def make_selection(self, data: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Any:
        """The selection mask [T] of a batch-level loss, from detached tensors of the whole optimizer batch."""
        if self.select is None:
            raise TypeError(f"{self.name} selects nothing")
        return self.select(*take(self, self.select, hidden(data, self.select)), **self.own(self.select, options))

    def complete(self, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every option of the function with its value: the given one, else the default."""
        given = {k: v for k, v in (options or {}).items() if k in self.options}
        return {k: d for k, (_, d) in self.options.items() if d is not REQUIRED} | given

    def needs_with(self, options: Mapping[str, Any] | None = None) -> frozenset[str]:
        """What the trainer must provide under these options."""
        if self.more_needs is None:
            return self.needs
        return self.needs | frozenset(self.more_needs(**self.complete(options)))

    def whitens(self, options: Mapping[str, Any] | None = None) -> bool:
        """Whether the trainer whitens the advantages: the option `whiten`, else what the entry was registered with."""
        return bool((options or {}).get("whiten", self.whiten))

    def own(self, fn: Callable[..., Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
        """The options that are meant for `fn`: those of the selection and `whiten` go elsewhere."""
        elsewhere = (set(self.options) | {"whiten"}) - option_names(fn)
        return {k: v for k, v in {**self.preset, **(options or {})}.items() if k not in elsewhere}


CARRY_GRADIENT = ("log_prob", "entropy")  # everything else that a policy loss gets is detached


def hidden(data: Mapping[str, Any], fn: Callable[..., Any]) -> dict[str, Any]:
    """What `fn` takes of the data: floats of the mask's shape are 0 where the mask is False, all but two detached."""
    mask = data.get("loss_mask")
    out = {}
    for name in positional(fn):
        value = data.get(name)
        if isinstance(value, torch.Tensor):
            value = value if name in CARRY_GRADIENT else value.detach()
            if mask is not None and value.is_floating_point() and value.shape == mask.shape:
                value = torch.where(mask.bool(), value, torch.zeros_like(value))
        out[name] = value
    return out


def take(entry: Entry, fn: Callable[..., Any], data: Mapping[str, Any]) -> list[Any]:
    """The positional arguments of `fn` out of `data`; absent optional ones become their default."""
    arguments = []
    for name, parameter in positional(fn).items():
        value = data.get(name)
        if value is None:
            if parameter.default is REQUIRED:
                raise KeyError(f"{entry.kind} {entry.name} needs {name}, which no stage of this run has made")
            value = parameter.default
        arguments.append(value)
    return arguments


@cache
def positional(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `fn` that name data."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {n: p for n, p in inspect.signature(fn).parameters.items() if p.kind in kinds}


@cache
def option_names(fn: Callable[..., Any]) -> frozenset[str]:
    """The names of the keyword-only parameters of `fn`."""
    parameters = inspect.signature(fn).parameters.items()
    return frozenset(n for n, p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def keyword_options(fn: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Keyword-only parameters of `fn` -> (annotation, default); an unannotated one takes anything."""
    try:
        hints = typing.get_type_hints(fn)
    except (NameError, TypeError):
        hints = {}
    parameters = inspect.signature(fn).parameters.items()
    return {n: (hints.get(n, Any), p.default) for n, p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def make_entry(
    kind: str, name: str, fn: Callable[..., Any], *, level: str, needs: Iterable[str] = (), **fields: Any
) -> Entry:
    """An entry whose data and options are read off the signature of `fn` (and of its `select`)."""
    taken, options = positional(fn), keyword_options(fn)
    if fields.get("select") is not None:
        options = keyword_options(fields["select"]) | options
    preset = fields.get("preset", {})
    return Entry(
        kind=kind,
        name=name,
        fn=fn,
        level=level,
        needs=frozenset(needs),
        data=tuple(taken),
        optional_data=frozenset(n for n, p in taken.items() if p.default is not REQUIRED),
        options={k: (annotation, preset.get(k, default)) for k, (annotation, default) in options.items()},
        summary=(inspect.getdoc(fn) or "").split("\n")[0],
        **fields,
    )
