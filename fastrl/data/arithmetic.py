"""Arithmetic word and digit problems made on the spot: a pure function of (seed, index), with disjoint splits.

A problem is `a +- b +- c ...`, optionally with a product in front (`a*b +- c ...`), whose every partial result is at
least 0. Which split it belongs to is decided by a hash of its canonical form (the sorted signed terms), so that no
problem, in any wording or order of its terms, is in both.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, fields
from typing import Literal

from fastrl.errors import DataError

HELD_OUT_FIFTH = 5  # one problem in five is held out
MAX_DRAWS = 20_000

NAMES = ("Ann", "Ben", "Eve", "Ian", "Kim", "Leo", "Mia", "Sam")
ITEMS = ("figs", "nuts", "pens", "eggs", "cups", "hats")
GAINS = ("gets {}", "buys {}", "finds {}")
LOSSES = ("gives {}", "sells {}", "loses {}")


@dataclass(frozen=True)
class Problem:
    """`numbers[0] operations[0] numbers[1] ...`, evaluated left to right; a `*` comes first or not at all."""

    numbers: tuple[int, ...]
    operations: tuple[str, ...]

    @property
    def expression(self) -> str:
        return str(self.numbers[0]) + "".join(f"{o}{n}" for o, n in zip(self.operations, self.numbers[1:]))

    @property
    def steps(self) -> tuple[tuple[int, str, int, int], ...]:
        """(left, operation, right, result) of each operation, in order."""
        steps, left = [], self.numbers[0]
        for operation, right in zip(self.operations, self.numbers[1:]):
            result = {"+": left + right, "-": left - right, "*": left * right}[operation]
            steps.append((left, operation, right, result))
            left = result
        return tuple(steps)

    @property
    def answer(self) -> int:
        return self.steps[-1][3]

    @property
    def canonical(self) -> str:
        """The same text for problems that differ by the order of their terms or factors only."""
        numbers, operations, terms = list(self.numbers), list(self.operations), []
        if operations and operations[0] == "*":
            low, high = sorted(numbers[:2])
            terms, numbers, operations = [f"+{low}*{high}"], numbers[2:], operations[1:]
        else:
            operations = ["+", *operations]
        terms += [f"{o}{n}" for o, n in zip(operations, numbers)]
        return " ".join(sorted(terms))

    @property
    def held_out(self) -> bool:
        """Whether the problem belongs to the validation split (one in five, by hash)."""
        digest = hashlib.blake2b(self.canonical.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_FIFTH == 0


@dataclass(frozen=True)
class ArithmeticOptions:
    """What `task:arithmetic` takes; `size` None means 8192 training or 256 validation problems."""

    max_value: int = 20
    num_terms: int = 3
    operations: str = "+-"
    style: Literal["words", "digits", "mixed"] = "mixed"
    size: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises DataError that names the first option with a value that cannot work."""
        for option in fields(self):
            value = getattr(self, option.name)
            integer = isinstance(value, int) and not isinstance(value, bool)
            optional = option.name == "size" and value is None
            if not (isinstance(value, str) if option.name in ("operations", "style") else integer or optional):
                raise DataError(f"task:arithmetic: option {option.name} = {value!r} has the wrong type")
        faults = {
            "max_value": self.max_value < 1 and "must be 1 or more",
            "num_terms": not 2 <= self.num_terms <= 8 and "must be between 2 and 8",
            "operations": (not self.operations or set(self.operations) - set("+-*")) and "takes characters of `+-*`",
            "style": self.style not in ("words", "digits", "mixed") and "must be words, digits or mixed",
            "size": self.size is not None and self.size < 1 and "must be 1 or more",
        }
        if self.operations == "*" and self.num_terms != 2:
            faults["num_terms"] = "must be 2 when operations is `*` alone (only the first operation may be a product)"
        for name, fault in faults.items():
            if fault:
                raise DataError(f"task:arithmetic: option {name} = {getattr(self, name)!r} {fault}")


def draw_problem(generator: random.Random, options: ArithmeticOptions, held_out: bool) -> Problem:
    """One problem of the asked split; raises DataError where the options leave none."""
    later = options.operations.replace("*", "")
    for _ in range(MAX_DRAWS):
        numbers = tuple(generator.randint(1, options.max_value) for _ in range(options.num_terms))
        operations = tuple(
            generator.choice(options.operations if i == 0 else later) for i in range(options.num_terms - 1)
        )
        problem = Problem(numbers, operations)
        if problem.held_out == held_out and min(step[3] for step in problem.steps) >= 0:
            return problem
    split = "held-out" if held_out else "training"
    raise DataError(f"task:arithmetic: no {split} problem exists with {options}; raise max_value or num_terms")


def word_problem(generator: random.Random, problem: Problem) -> str:
    """The problem as a one-line story, e.g. `Ann has 7 figs, gets 8, gives 6. How many?`"""
    name, item = generator.choice(NAMES), generator.choice(ITEMS)
    numbers, operations = problem.numbers, problem.operations
    parts = [f"{name} has {numbers[0]} {item}"]
    if operations[0] == "*":
        parts = [f"{name} has {numbers[0]} bags of {numbers[1]} {item}"]
        numbers, operations = numbers[1:], operations[1:]
    for operation, number in zip(operations, numbers[1:]):
        parts.append(generator.choice(GAINS if operation == "+" else LOSSES).format(number))
    return ", ".join(parts) + ". How many?"


def arithmetic_problem(options: ArithmeticOptions, held_out: bool, index: int) -> tuple[str, Problem]:
    """Problem number `index` of a split and its wording: a pure function of the options, the split and the index."""
    generator = random.Random(f"arithmetic/{options.seed}/{int(held_out)}/{index}")
    problem = draw_problem(generator, options, held_out)
    words = options.style == "words" or (options.style == "mixed" and generator.random() < 0.5)
    text = word_problem(generator, problem) if words else f"What is {problem.expression}?"
    return text, problem
