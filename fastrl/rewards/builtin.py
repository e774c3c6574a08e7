"""The built-in reward functions: (response, answer) texts -> 1, 0, or None where there is no reference.

`exact` and `regex` are cheap. `math` and `reasoning_gym` may run long: the pool calls them in a process it can kill.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fastrl.rewards.answers import (
    announced_answer,
    as_number,
    last_match,
    last_number,
    marked_answer,
    reference_answer,
    same_answer,
)

MAX_BARE_ANSWER = 200  # characters of a response that may as a whole be the answer


def references(answer: Any) -> list[str]:
    """The accepted answers as texts: one, or each of a list."""
    if answer is None:
        return []
    return [reference_answer(a) for a in (answer if isinstance(answer, list | tuple) else [answer])]


def exact(response: str, answer: Any, *, pattern: re.Pattern[str] | None = None) -> float | None:
    """1 where the response's answer is the reference: as a number, or as text.

    The answer is the pattern's last match (group 1 if there is one); without a pattern the last number, or, where the
    reference is not a number, the whole response.
    """
    accepted = references(answer)
    if not accepted:
        return None
    if pattern is not None:
        found = last_match(pattern, response)
        return float(any(same_answer(found, reference) for reference in accepted))
    number = last_number(response)
    for reference in accepted:
        found = number if as_number(reference) is not None else response
        if same_answer(found, reference):
            return 1.0
    return 0.0


def regex(response: str, *, pattern: re.Pattern[str]) -> float:
    """1 where the pattern matches the whole response."""
    return float(pattern.fullmatch(response) is not None)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern as the rewards use it: `.` matches newlines too."""
    return re.compile(pattern, re.DOTALL)


@lru_cache(maxsize=64)
def backtracking_degree(pattern: str) -> int:
    """How badly matching may scale: the number of unbounded repeats, plus one for the search; 99 where they nest."""
    bare = re.sub(r"\\.", "a", pattern, flags=re.DOTALL)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "a", bare)
    if re.search(r"\)[*+{]", bare):
        return 99
    return 1 + len(re.findall(r"[*+]|\{\d*,\}", bare))


def quick_math(response: str, answer: Any) -> float | None:
    """What `math` will say where plain arithmetic can tell at once, else None.

    A marked final answer that is an integer decides against an integer reference; an unmarked one only confirms.
    """
    accepted = references(answer)
    marked = marked_answer(response)
    found = marked if marked is not None else last_number(response)
    if any(same_answer(found, reference) for reference in accepted):
        return 1.0
    numbers = [as_number(text) for text in [marked or "", *accepted]]
    decided = bool(accepted) and all(number is not None and number == number.to_integral() for number in numbers)
    return 0.0 if decided else None


def math(response: str, answer: Any) -> float | None:
    """1 where math-verify finds the response's answer equal to the reference, symbolically."""
    accepted = references(answer)
    if not accepted:
        return None
    quick = quick_math(response, answer)
    if quick is not None:
        return quick
    parse, verify = _math_verify()
    marked = marked_answer(response)
    texts = [response] if marked is None else [f"\\boxed{{{marked}}}", marked]
    targets = [parse(text, parsing_timeout=None) for text in texts]
    if not any(targets) and len(response) <= MAX_BARE_ANSWER:  # a bare expression, without text or dollar signs
        targets = [parse(f"\\boxed{{{response.strip()}}}", parsing_timeout=None)]
    for reference in accepted:
        gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=None) or parse(reference, parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot parse the reference answer {reference!r}")
        if any(verify(gold, target, timeout_seconds=None) for target in targets):
            return 1.0
    return 0.0


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off: ours is on
    from math_verify import parse, verify

    return parse, verify


def reasoning_gym(response: str, *, task: dict[str, Any] | None) -> float | None:
    """The task's own score of the response's final answer, in [0, 1]; None for prompts of other sources.

    Args:
        response: its marked final answer is scored, else its last number where the reference is one, else all of it.
        task: the prompt's `reasoning_gym` column: name, options, entry.
    """
    if not task:
        return None
    entry = task["entry"]
    score = _scorer(task["name"], task["options"])
    found = marked_answer(response) or announced_answer(response)
    if found is None:
        reference_is_number = as_number(str(entry["answer"])) is not None
        found = last_number(response) if reference_is_number else response.strip()
    try:
        return float(score(found, entry))
    except Exception:
        # Some scorers raise on answers they cannot parse. That is a wrong answer only if the right one passes.
        if entry["answer"] is not None and float(score(entry["answer"], entry)) == 1.0:
            return 0.0
        raise


_SCORERS: dict[tuple[str, str], Callable[..., float]] = {}


def _scorer(name: str, options: dict[str, Any]) -> Callable[..., float]:
    key = (name, repr(sorted(options.items())))
    if key not in _SCORERS:
        import reasoning_gym as package

        _SCORERS[key] = package.create_dataset(name, size=1, seed=0, **options).score_answer
    return _SCORERS[key]
