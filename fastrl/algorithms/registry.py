"""Names for algorithms: what the configuration can choose, what each one needs and which options it takes.

Registering gives a function a name; `package.module:function` needs no registering. `entry.Entry` says what is known
about each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fastrl.algorithms.entry import REQUIRED, Entry, make_entry, positional
from fastrl.algorithms.options import check_value, nearest
from fastrl.errors import ConfigError

__all__ = ["REQUIRED", "Entry", "add", "check_options", "get", "make_entry"]

F = TypeVar("F", bound=Callable[..., Any])
KEYS = {"advantage": "advantage", "policy_loss": "policy_loss", "correction": "correction", "kl": "kl_loss_kind"}
LEVELS = {
    "advantage": ("token", "sequence"),
    "policy_loss": ("token", "sequence", "batch"),
    "correction": ("token", "sequence"),
    "kl": ("token",),
}
ROOMS = {
    "advantage": "fastrl.algorithms.advantages",
    "policy_loss": "fastrl.algorithms.losses",
    "correction": "fastrl.algorithms.rollout_correction",
    "kl": "fastrl.algorithms.kl",
}
# What the trainer can hand to an estimator or a loss; anything else that one takes nobody would ever make.
DATA = {
    "advantage": (
        "scores, group_id, valid, lengths, components, greedy_scores, sample_id, running_baseline, "
        "token_level_rewards, response_mask, cu_seqlens, values, bootstrap_values, old_log_prob, sum_sq, rollout_weight"
    ),
    "policy_loss": (
        "log_prob, old_log_prob, advantages, entropy, rollout_log_prob, ref_log_prob, rollout_weight, loss_mask, "
        "cu_seqlens, selection, staleness"
    ),
}
_entries: dict[str, dict[str, Entry]] = {kind: {} for kind in ROOMS}


def add(entry: Entry) -> Entry:
    """Put an entry in the registry; a name that another function has, or an unknown level, is refused."""
    if entry.level not in LEVELS[entry.kind]:
        raise ConfigError(f"{entry.name}: level = {entry.level!r} is none of {', '.join(LEVELS[entry.kind])}")
    known = _entries[entry.kind].get(entry.name)
    if known is not None and where_from(known) != where_from(entry):
        raise ConfigError(f"{entry.kind} {entry.name!r} is already registered by {where_from(known)}")
    _entries[entry.kind][entry.name] = entry
    return entry


def where_from(entry: Entry) -> str:
    return f"{entry.fn.__module__}:{entry.fn.__qualname__}"


def register(kind: str, name: str, **fields: Any) -> Callable[[F], F]:
    """Decorator: give a function a name of the kind; `fields` are those of `Entry`."""

    def decorate(fn: F) -> F:
        add(make_entry(kind, name, fn, **fields))
        return fn

    return decorate


def register_advantage(
    name: str, *, level: str = "token", needs: Iterable[str] = (), whiten: bool = False, **fields: Any
) -> Callable[[F], F]:
    """Decorator: make a function choosable as `algorithm.advantage = name`.

    Args:
        level: "sequence" (gets the [S] scalars of all ranks, returns advantages [S]) or "token" (gets this rank's
            ragged [T] data with whole groups, returns `(advantages [T], returns [T])`).
        needs: what the trainer must make besides the rollout: values, greedy_scores, components, old_log_prob, sum_sq.
        whiten: the trainer whitens the result over response_mask of the whole rollout batch.
        fields: `check`, `more_needs` and `preset` of `Entry`.
    """
    return register("advantage", name, level=level, needs=needs, whiten=whiten, **fields)


def register_policy_loss(
    name: str, *, level: str = "token", needs: Iterable[str] = (), **fields: Any
) -> Callable[[F], F]:
    """Decorator: make a function choosable as `algorithm.policy_loss = name`. It returns a `TokenLoss`.

    Args:
        level: "token" (each token's loss needs that token only), "sequence" (also gets cu_seqlens and loss_mask of
            whole sequences), or "batch" (gets `selection`, made by `select` from the whole optimizer batch).
        needs: what the trainer must make besides the rollout: pre_update_pass, old_log_prob, rollout_log_prob,
            staleness.
        fields: `select`, `loss_agg_mode`, `only_loss_agg_modes`, `check`, `more_needs` and `preset` of `Entry`.
    """
    return register("policy_loss", name, level=level, needs=needs, **fields)


def register_correction(
    name: str, *, level: str = "token", needs: Iterable[str] = (), **fields: Any
) -> Callable[[F], F]:
    """Decorator: make a function choosable as `algorithm.correction = name`. It returns a `Correction`."""
    return register("correction", name, level=level, needs=needs, **fields)


def register_kl(name: str, *, level: str = "token", needs: Iterable[str] = (), **fields: Any) -> Callable[[F], F]:
    """Decorator: make a function of (log_prob, ref_log_prob) -> KL per token choosable as a KL kind."""
    return register("kl", name, level=level, needs=needs, **fields)


def names(kind: str) -> list[str]:
    """Registered names of a kind, sorted."""
    importlib.import_module(ROOMS[kind])
    return sorted(_entries[kind])


def list_advantages() -> list[str]:
    """Names accepted by `algorithm.advantage`."""
    return names("advantage")


def list_policy_losses() -> list[str]:
    """Names accepted by `algorithm.policy_loss`."""
    return names("policy_loss")


def list_corrections() -> list[str]:
    """Names accepted by `algorithm.correction`."""
    return names("correction")


def list_kls() -> list[str]:
    """Names accepted by `algorithm.kl_loss_kind` and `algorithm.kl_reward_kind`."""
    return names("kl")


def get_advantage(name: str) -> Entry:
    """The advantage estimator called `name`, or the function that `package.module:function` names."""
    return get("advantage", name)


def get_policy_loss(name: str) -> Entry:
    """The policy loss called `name`, or the function that `package.module:function` names."""
    return get("policy_loss", name)


def get_correction(name: str) -> Entry:
    """The rollout correction called `name`, or the function that `package.module:function` names."""
    return get("correction", name)


def get_kl(name: str) -> Entry:
    """The KL estimator called `name`, or the function that `package.module:function` names."""
    return get("kl", name)


def get(kind: str, name: str) -> Entry:
    """The entry of a kind by registered name or `package.module:function`.

    Raises:
        ConfigError: no such name (with the nearest one), or a function that cannot be imported.
    """
    known = names(kind)
    if name in _entries[kind]:
        return _entries[kind][name]
    if ":" in name:
        return load(kind, name)
    known_names = ", ".join(known)
    raise ConfigError(
        f"algorithm.{KEYS[kind]} = {name!r} is not registered{nearest(name, known)} "
        f"(known: {known_names}; your own: package.module:function)"
    )


def load(kind: str, path: str) -> Entry:
    """The entry for `package.module:function`: the one its module registers, else one made from the signature."""
    module_name, _, function_name = path.partition(":")
    try:
        fn: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            fn = getattr(fn, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"algorithm.{KEYS[kind]} = {path}: cannot be imported ({error})") from error
    if not callable(fn):
        raise ConfigError(f"algorithm.{KEYS[kind]} = {path}: not a function")
    _check_data(kind, path, fn)
    for entry in _entries[kind].values():
        if entry.fn is fn:
            return replace(entry, name=path)
    return make_entry(kind, path, fn, level=guessed_level(kind, path, fn))


def _check_data(kind: str, path: str, fn: Callable[..., Any]) -> None:
    """Refuses a function whose positional parameters name what no stage makes."""
    known = DATA.get(kind, "").split(", ")
    try:
        taken = positional(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm.{KEYS[kind]} = {path}: its parameters cannot be read ({error})") from error
    unknown = [name for name, p in taken.items() if p.default is REQUIRED and name not in known]
    if kind in DATA and (unknown or not taken):
        what = f"no stage makes {unknown[0]!r}{nearest(unknown[0], known)}" if unknown else "it takes no data"
        raise ConfigError(
            f"algorithm.{KEYS[kind]} = {path}: {what} (positional parameters name data: {DATA[kind]}; options are "
            "keyword-only)"
        )


def guessed_level(kind: str, path: str, fn: Callable[..., Any]) -> str:
    """What an unregistered function works on, by the data its positional parameters name."""
    taken = positional(fn)
    if "selection" in taken:
        raise ConfigError(
            f"algorithm.{KEYS[kind]} = {path}: register it with level='batch' and select=... to get a selection"
        )
    whole = {"advantage": "scores", "policy_loss": "cu_seqlens"}.get(kind)
    return "sequence" if whole in taken else "token"


def check_options(entry: Entry, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with values converted to the declared types, for `entry.call`.

    Every advantage also accepts `whiten` (bool), which the trainer asks for with `entry.whitens(options)`.

    Raises:
        ConfigError: unknown names (with the nearest one), wrong types, missing or wrong values; all of them at once.
    """
    allowed = dict(entry.options)
    if entry.kind == "advantage":
        allowed.setdefault("whiten", (bool, entry.whiten))
    where, wrong, checked = f"algorithm.{KEYS[entry.kind]}_options", [], {}
    for name, value in options.items():
        if name not in allowed:
            takes = ", ".join(sorted(allowed)) or "no options"
            wrong.append(f"{where}.{name}: unknown option{nearest(name, allowed)} ({entry.name} takes {takes})")
            continue
        try:
            checked[name] = check_value(value, allowed[name][0])
        except ValueError as error:
            wrong.append(f"{where}.{name} = {value!r}: {error}")
    for name, (_, default) in allowed.items():
        if default is REQUIRED and name not in options:
            wrong.append(f"{where}.{name}: {entry.name} needs a value for it")
    if not wrong and entry.check is not None:
        problem = entry.check(**entry.complete(checked))
        if problem:
            wrong.append(f"{where}: {problem}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return checked
