"""The cursor's laws: order is a pure function of (seed, epoch, position), resumable at any point, nothing dropped."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl.data.prompts import Prompt, PromptCursor, PromptSet
from fastrl.errors import DataError


def prompt_set(size, first=0):
    return PromptSet([Prompt(i, (i,), str(i), None, "s", None) for i in range(first, first + size)])


def ids(prompts):
    return [p.prompt_id for p in prompts]


def test_each_epoch_is_a_permutation_and_differs():
    cursor = PromptCursor(prompt_set(50), seed=3)
    epochs = [ids(cursor.take(50)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ids(PromptCursor(prompt_set(50), seed=4).take(50)) != epochs[0]
    assert ids(PromptCursor(prompt_set(50), seed=3).take(50)) == epochs[0]


def test_without_shuffle_every_epoch_is_the_dataset_order():
    assert ids(PromptCursor(prompt_set(3), shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_the_last_partial_batch_is_used():
    cursor = PromptCursor(prompt_set(10), shuffle=False)
    assert cursor.steps_per_epoch(4) == 3
    assert [ids(cursor.take_within_epoch(4)) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert (cursor.epoch, cursor.position, cursor.epochs_done) == (1, 4, 1.4)


@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 3),
    takes=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=6),
    later=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_resume_continues_with_the_very_next_prompt(size, seed, takes, later):
    def walk(cursor, steps):
        return [ids(cursor.take_within_epoch(n) if within else cursor.take(n)) for within, n in steps]

    cursor = PromptCursor(prompt_set(size), seed=seed)
    walk(cursor, takes)
    state = cursor.state_dict()
    resumed = PromptCursor(prompt_set(size), seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
    assert walk(resumed, later) == walk(cursor, later)


@given(size=st.integers(1, 12), parts=st.lists(st.integers(1, 7), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_how_the_walk_is_cut_does_not_matter(size, parts):
    cursor = PromptCursor(prompt_set(size), seed=1)
    assert [i for n in parts for i in ids(cursor.take(n))] == ids(
        PromptCursor(prompt_set(size), seed=1).take(sum(parts))
    )


def test_resume_exactly_at_an_epochs_end():
    cursor = PromptCursor(prompt_set(6), seed=0)
    for _ in range(3):
        cursor.take_within_epoch(2)
    state = cursor.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    resumed = PromptCursor(prompt_set(6), seed=0)
    resumed.load_state_dict(state)
    assert [len(resumed.take_within_epoch(2)) for _ in range(3)] == [2, 2, 2]


def test_another_dataset_starts_at_its_first_row_with_a_warning():
    cursor = PromptCursor(prompt_set(6), shuffle=False)
    cursor.take(4)
    other = PromptCursor(prompt_set(6, first=10), shuffle=False)
    with pytest.warns(UserWarning, match="not those of the checkpoint"):
        other.load_state_dict(cursor.state_dict())
    assert ids(other.take(2)) == [10, 11]


def test_another_seed_warns_and_keeps_the_position():
    cursor = PromptCursor(prompt_set(6), seed=0)
    cursor.take(4)
    other = PromptCursor(prompt_set(6), seed=1)
    with pytest.warns(UserWarning, match=r"run\.seed"):
        other.load_state_dict(cursor.state_dict())
    assert other.position == 4


def test_an_empty_set_is_refused():
    with pytest.raises(DataError):
        PromptCursor(prompt_set(0))
