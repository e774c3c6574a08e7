"""Built-in tasks: right answers, pure functions of (seed, index), splits that share nothing."""

import ast
import re

import pytest

from fastrl.data.arithmetic import ArithmeticOptions, Problem, arithmetic_problem
from fastrl.data.tasks import one_digit_sums, task_rows
from fastrl.errors import DataError

SIGN = {"gets": 1, "buys": 1, "finds": 1, "gives": -1, "sells": -1, "loses": -1}


def rows(name, split="train", **options):
    return list(task_rows(name, split=split, options=options))


def value_of(prompt):
    """The answer worked out from the prompt's text alone."""
    if prompt.startswith("What is"):
        expression = prompt.removeprefix("What is ").removesuffix("?")
        return eval(compile(ast.parse(expression, mode="eval"), "", "eval"))
    bags = re.search(r"has (\d+) bags of (\d+)", prompt)
    total = int(bags[1]) * int(bags[2]) if bags else int(re.search(r"has (\d+)", prompt)[1])
    return total + sum(SIGN[verb] * int(n) for verb, n in re.findall(r"(\w+) (\d+)[,.]", prompt) if verb in SIGN)


@pytest.mark.parametrize("options", [{}, {"operations": "+-*", "num_terms": 4, "max_value": 9}, {"num_terms": 2}])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_arithmetic_answers_follow_from_the_text(options, split):
    for row in rows("arithmetic", split, size=300, **options):
        assert int(row["answer"]) == value_of(row["prompt"]) >= 0
        assert row["data_source"] == "arithmetic"


def test_arithmetic_styles():
    digits = rows("arithmetic", style="digits", size=50)
    words = rows("arithmetic", style="words", size=50)
    assert all(row["prompt"].startswith("What is") for row in digits)
    assert all(row["prompt"].endswith("How many?") for row in words)
    mixed = [row["prompt"].startswith("What is") for row in rows("arithmetic", size=400)]
    assert 120 < sum(mixed) < 280


def test_arithmetic_is_a_pure_function_of_seed_and_index():
    full, head = rows("arithmetic", size=60), rows("arithmetic", size=10)
    assert full[:10] == head
    assert full[37]["prompt"] == arithmetic_problem(ArithmeticOptions(), False, 37)[0]
    assert rows("arithmetic", size=10, seed=1) != head
    assert head[0] == {"prompt": full[0]["prompt"], "answer": full[0]["answer"], "data_source": "arithmetic"}


def test_arithmetic_problems_do_not_drift_between_versions():
    # written down once: a change here changes every run and the packaged model's held-out set
    texts = [arithmetic_problem(ArithmeticOptions(), held_out, 0)[0] for held_out in (False, True)]
    assert texts == EXPECTED_FIRST


EXPECTED_FIRST = ["Mia has 3 figs, gets 18, finds 10. How many?", "What is 14+5-19?"]


def test_arithmetic_splits_are_disjoint_in_any_order_of_terms():
    def keys(split):
        problems = [arithmetic_problem(ArithmeticOptions(max_value=9), split, i)[1] for i in range(3000)]
        return {frozenset_of_terms(problem) for problem in problems}

    def frozenset_of_terms(problem):
        signs = ["+", *problem.operations]
        return tuple(sorted(zip(signs, problem.numbers)))

    assert not keys(False) & keys(True)


def test_canonical_form_ignores_the_order_of_terms_and_factors():
    assert Problem((7, 8, 6), ("+", "-")).canonical == Problem((8, 6, 7), ("-", "+")).canonical
    assert Problem((3, 4, 5), ("*", "+")).canonical == Problem((4, 3, 5), ("*", "+")).canonical
    assert Problem((3, 4, 5), ("*", "+")).canonical != Problem((3, 5, 4), ("*", "+")).canonical


def test_one_digit_sums_are_the_81_with_a_fixed_fifth_held_out():
    train, held_out = one_digit_sums()
    assert len(train) + len(held_out) == 81 and len(held_out) == 16
    assert set(train) | set(held_out) == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert not {tuple(sorted(p)) for p in train} & {tuple(sorted(p)) for p in held_out}
    row = rows("one_digit_sums")[0]
    a, b = train[0]
    assert row["prompt"] == f"What is {a} + {b}? Answer with just the number." and row["answer"] == str(a + b)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmatic", {}, "did you mean arithmetic"),
        ("arithmetic", {"maxvalue": 3}, "did you mean max_value"),
        ("arithmetic", {"max_value": 0}, "max_value = 0 must be 1 or more"),
        ("arithmetic", {"max_value": "9"}, "wrong type"),
        ("arithmetic", {"operations": "/"}, "operations"),
        ("arithmetic", {"operations": "*"}, "num_terms"),
        ("arithmetic", {"style": "prose"}, "style"),
        ("arithmetic", {"max_value": 1, "operations": "-"}, "no training problem exists"),
        ("one_digit_sums", {"size": 3}, "takes none"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(DataError, match=message):
        rows(name, **options)


CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("reasoning_gym")

    def test_splits_are_disjoint_and_pure(self):
        train = rows("reasoning_gym/chain_sum", size=400, **CHAIN_SUM)
        held_out = rows("reasoning_gym/chain_sum", "validation", size=40, **CHAIN_SUM)
        assert len(train) == 400 and len(held_out) == 40
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
        assert rows("reasoning_gym/chain_sum", size=400, **CHAIN_SUM) == train
        assert rows("reasoning_gym/chain_sum", size=400, seed=1, **CHAIN_SUM) != train

    def test_the_entry_is_kept_for_scoring(self):
        row = rows("reasoning_gym/chain_sum", size=1, **CHAIN_SUM)[0]
        assert row["reasoning_gym"]["entry"]["answer"] == row["answer"]
        assert row["reasoning_gym"]["options"] == CHAIN_SUM
        assert row["data_source"] == "reasoning_gym/chain_sum"

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("chainsum", {}, "did you mean chain_sum"),
            ("chain_sum", {"terms": 2}, "unknown option 'terms'"),
            ("chain_sum", {"min_terms": 5, "max_terms": 2}, "not accepted"),
        ],
    )
    def test_wrong_options_are_named(self, name, options, message):
        with pytest.raises(DataError, match=message):
            rows(f"reasoning_gym/{name}", **options)
