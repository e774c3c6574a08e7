"""Built-in task sources: problems made on the spot, seeded, with disjoint training and validation splits.

`arithmetic`, `one_digit_sums`, and `reasoning_gym/<name>` for every task of the reasoning-gym package.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from fastrl.data.arithmetic import ArithmeticOptions, arithmetic_problem
from fastrl.errors import DataError

DEFAULT_SIZES = {"train": 8192, "validation": 256}  # problems per split
REASONING_GYM_SIZES = {"train": 2048, "validation": 128}  # fewer: some of its tasks take milliseconds a question
HELD_OUT_FIFTH = 5  # one distinct reasoning-gym question in five is held out
SPARE_DRAWS = 1000  # questions drawn beyond twice the expected number before giving up

Row = dict[str, Any]


def task_rows(name: str, *, split: str, options: Mapping[str, Any]) -> Iterator[Row]:
    """The rows (`prompt`, `answer`, `data_source`, task columns) of a task's split.

    Args:
        name: "arithmetic", "one_digit_sums" or "reasoning_gym/<task>".
        split: "train" or "validation"; no problem is in both.
        options: the task's keyword options; `seed` and `size` (number of problems) exist for all that draw at random.

    Raises:
        DataError: unknown task, unknown option, or a value that cannot work.
    """
    if split not in DEFAULT_SIZES:
        raise DataError(f"task:{name}: split {split!r} is neither train nor validation")
    if name.startswith("reasoning_gym/"):
        return _reasoning_gym(name.removeprefix("reasoning_gym/"), split, dict(options))
    if name not in TASKS:
        raise DataError(f"task:{name}: unknown task{_did_you_mean(name, TASKS)}; {_known_tasks()}")
    return TASKS[name](split, dict(options))


def _known_tasks() -> str:
    return f"known are {', '.join(TASKS)} and reasoning_gym/<name>"


def _did_you_mean(word: str, known: Any) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _check_names(task: str, options: Mapping[str, Any], known: list[str]) -> None:
    for name in options:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise DataError(f"task:{task}: unknown option {name!r}{_did_you_mean(name, known)}; {takes}")


def _arithmetic(split: str, options: dict[str, Any]) -> Iterator[Row]:
    _check_names("arithmetic", options, [f.name for f in fields(ArithmeticOptions)])
    settings = ArithmeticOptions(**options)
    settings.check()
    size = settings.size or DEFAULT_SIZES[split]
    for index in range(size):
        text, problem = arithmetic_problem(settings, split == "validation", index)
        yield {"prompt": text, "answer": str(problem.answer), "data_source": "arithmetic"}


def one_digit_sums() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The 81 pairs (a, b) of digits 1..9 as (training, held-out): a fixed fifth is held out, a+b together with b+a."""

    def rank(pair: tuple[int, int]) -> bytes:
        return hashlib.blake2b(f"{pair[0]}+{pair[1]}".encode(), digest_size=8).digest()

    unordered = sorted([(a, b) for a in range(1, 10) for b in range(a, 10)], key=rank)
    held_out = set(unordered[: len(unordered) // HELD_OUT_FIFTH])
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    is_held_out = [(min(pair), max(pair)) in held_out for pair in pairs]
    train = [pair for pair, out in zip(pairs, is_held_out) if not out]
    return train, [pair for pair, out in zip(pairs, is_held_out) if out]


def _one_digit_sums(split: str, options: dict[str, Any]) -> Iterator[Row]:
    _check_names("one_digit_sums", options, [])
    for a, b in one_digit_sums()[split == "validation"]:
        prompt = f"What is {a} + {b}? Answer with just the number."
        yield {"prompt": prompt, "answer": str(a + b), "data_source": "one_digit_sums"}


def _question_held_out(question: str) -> bool:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_FIFTH == 0


def _reasoning_gym(name: str, split: str, options: dict[str, Any]) -> Iterator[Row]:
    """Questions of a reasoning-gym task; which split one belongs to is decided by a hash of its text."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(
            f"task:reasoning_gym/{name}: needs the reasoning-gym package; pip install 'fastrl[reasoning]'"
        ) from None
    if name not in DATASETS:
        raise DataError(f"task:reasoning_gym/{name}: reasoning-gym has no such task{_did_you_mean(name, DATASETS)}")
    _, config_class = DATASETS[name]
    _check_names(f"reasoning_gym/{name}", options, list(inspect.signature(config_class).parameters))
    size, seed = options.pop("size", REASONING_GYM_SIZES[split]), options.pop("seed", 0)
    try:
        # twice what the split needs on average: items are made one by one, those of the other split are passed over
        num_items = 2 * size * (HELD_OUT_FIFTH if split == "validation" else 1) + SPARE_DRAWS
        dataset = reasoning_gym.create_dataset(name, size=num_items, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"task:reasoning_gym/{name}: options {options} are not accepted: {error}") from error
    return _split_of_dataset(dataset, name, split, size, options)


def _split_of_dataset(dataset: Any, name: str, split: str, size: int, options: dict[str, Any]) -> Iterator[Row]:
    found = 0
    for index in range(len(dataset)):
        if found == size:
            return
        entry = dataset[index]
        if _question_held_out(entry["question"]) != (split == "validation"):
            continue
        found += 1
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "data_source": f"reasoning_gym/{name}",
            "reasoning_gym": {"name": name, "options": options, "entry": dict(entry)},
        }
    if found < size:
        raise DataError(
            f"task:reasoning_gym/{name}: only {found} of {size} {split} questions in {len(dataset)} drawn; "
            "the task has too few distinct questions with these options"
        )


TASKS: dict[str, Callable[[str, dict[str, Any]], Iterator[Row]]] = {
    "arithmetic": _arithmetic,
    "one_digit_sums": _one_digit_sums,
}
