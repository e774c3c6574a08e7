"""Micro-batches against what can be written down by hand, and against a tree made of Python tuples."""

import random

import pytest
import torch

from fastrl.data.batch import RolloutBatch, cu_seqlens_of
from fastrl.data.packing import Segment, keep_tokens, pack, plan_optimizer_batches
from fastrl.errors import DataError


def batch_of(groups: list[tuple[list[int], list[list[int]]]]) -> RolloutBatch:
    """Groups of (prompt, responses)."""
    prompts, responses = [p for p, _ in groups], [r for _, rs in groups for r in rs]
    group_index = torch.tensor([g for g, (_, rs) in enumerate(groups) for _ in rs], dtype=torch.int64)
    total, count = sum(map(len, responses)), len(responses)
    return RolloutBatch(
        prompt_ids=torch.tensor([t for p in prompts for t in p], dtype=torch.int64),
        prompt_cu_seqlens=cu_seqlens_of(torch.tensor([len(p) for p in prompts])),
        response_ids=torch.tensor([t for r in responses for t in r], dtype=torch.int64),
        cu_seqlens=cu_seqlens_of(torch.tensor([len(r) for r in responses])),
        group_index=group_index,
        group_id=group_index * 7 + 3,
        sample_id=torch.arange(count),
        finish_reason=torch.zeros(count, dtype=torch.int8),
        policy_version=torch.zeros(count, dtype=torch.int64),
        response_mask=torch.ones(total, dtype=torch.bool),
    )


def path_of(micro, row):
    """The tokens that a row reads, its own last, from the segments alone."""
    (segment,) = [s for s in micro.segments if s.start <= row < s.end]
    rows = [r for a, b in segment.prefix for r in range(a, b)] + list(range(segment.start, row + 1))
    assert micro.position_ids[rows].tolist() == list(range(len(rows)))
    return tuple(micro.input_ids[rows].tolist())


def check(batch, micros, sequences, *, max_tokens, extra=()):
    """Every response token exactly once, predicted by the row that has read exactly what stands before it."""
    seen, bootstrapped = [], []
    for micro in micros:
        assert [s.start for s in micro.segments] == [0, *(s.end for s in micro.segments[:-1])]
        assert micro.segments[-1].end == micro.num_rows
        for row, label, token in zip(micro.head_index.tolist(), micro.labels.tolist(), micro.token_index.tolist()):
            s = int(batch.sequence_index[token])
            prompt = batch.prompt_ids.split(batch.prompt_lengths.tolist())[int(batch.group_index[s])].tolist()
            start = int(batch.cu_seqlens[s])
            assert path_of(micro, row) == (*prompt, *batch.response_ids[start:token].tolist())
            assert label == int(batch.response_ids[token])
            seen.append(token)
        assert batch.sequence_index[micro.token_index].unique_consecutive().tolist() == [
            s for s in micro.sequences.tolist() if batch.lengths[s]
        ]
        for row, s in zip(micro.bootstrap_index.tolist(), micro.bootstrap_sequence.tolist()):
            prompt = batch.prompt_ids.split(batch.prompt_lengths.tolist())[int(batch.group_index[s])].tolist()
            response = batch.response_ids.split(batch.lengths.tolist())[s].tolist()
            assert path_of(micro, row) == (*prompt, *response)
            bootstrapped.append(s)
        assert micro.num_rows <= max_tokens or micro.sequences.numel() == 1
    wanted = [t for s in sequences for t in range(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))]
    assert sorted(seen) == sorted(wanted)
    assert sorted(bootstrapped) == sorted(extra)


def test_one_group_by_hand():
    (micro,) = pack(batch_of([([7, 8, 9], [[1, 2], [3]])]), max_tokens=10)
    assert micro.input_ids.tolist() == [7, 8, 9, 1]
    assert micro.position_ids.tolist() == [0, 1, 2, 3]
    assert micro.head_index.tolist() == [2, 2, 3]  # the shorter input comes first: the row of 9 predicts 3; 1; then 2
    assert micro.labels.tolist() == [3, 1, 2]
    assert micro.token_index.tolist() == [2, 0, 1]
    assert micro.sequences.tolist() == [1, 0]
    assert micro.segments == (Segment(0, 3), Segment(3, 4, ((0, 3),)))
    assert micro.bootstrap_index.numel() == 0


def test_the_example_of_the_module():
    """Prompt [a b c], responses [x y w] and [x z]: the second adds no row."""
    (micro,) = pack(batch_of([([1, 2, 3], [[4, 5, 6], [4, 7]])]), max_tokens=10)
    assert micro.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert {(r, l) for r, l in zip(micro.head_index.tolist(), micro.labels.tolist())} == {
        (2, 4),
        (3, 5),
        (4, 6),
        (3, 7),
    }
    assert micro.num_tokens == 5


def test_groups_share_a_system_prompt():
    batch = batch_of([([1, 1, 5], [[6, 6], [7, 7]]), ([1, 1, 8], [[6, 6]])])
    (micro,) = pack(batch, max_tokens=20)
    assert micro.num_rows == 2 + (1 + 2) + (1 + 1)  # the common [1 1]; 5 and its 6, 7; 8 and its 6
    assert micro.num_rows == len({path_of(micro, row) for row in range(micro.num_rows)})
    check(batch, [micro], range(3), max_tokens=20)


def test_share_prompts_off_repeats_everything():
    batch = batch_of([([1, 2], [[3, 4], [3, 4]])])
    (micro,) = pack(batch, max_tokens=20, share_prompts=False)
    assert micro.input_ids.tolist() == [1, 2, 3, 1, 2, 3]
    assert micro.segments == (Segment(0, 3), Segment(3, 6))
    check(batch, [micro], range(2), max_tokens=20)


def test_empty_responses_cost_nothing():
    assert pack(batch_of([([1, 2, 3], [[], []])]), max_tokens=10) == []
    batch = batch_of([([1, 2, 3], [[], []]), ([4, 5], [[], [6, 7]])])
    (micro,) = pack(batch, max_tokens=10)
    assert micro.input_ids.tolist() == [4, 5, 6]
    assert micro.sequences.tolist() == [3]


def test_extra_rows():
    """The row after the last token: the last token's own, or the prompt's last where the response is empty."""
    batch = batch_of([([1, 2], [[3, 4], []])])
    (micro,) = pack(batch, max_tokens=10, extra_row=True)
    assert micro.input_ids.tolist() == [1, 2, 3, 4]
    assert dict(zip(micro.bootstrap_sequence.tolist(), micro.bootstrap_index.tolist())) == {0: 3, 1: 1}
    check(batch, [micro], range(2), max_tokens=10, extra=[0, 1])
    (micro,) = pack(batch, max_tokens=10, extra_row=torch.tensor([False, True]))
    assert micro.input_ids.tolist() == [1, 2, 3]
    check(batch, [micro], range(2), max_tokens=10, extra=[1])


def test_a_group_over_the_budget_is_split_with_its_prompt():
    batch = batch_of([([1, 2, 3], [[10, 11, 12], [20, 21, 22], [30, 31, 32]])])
    micros = pack(batch, max_tokens=7)
    assert [m.num_rows for m in micros] == [7, 5]
    assert all(m.input_ids[:3].tolist() == [1, 2, 3] for m in micros)
    check(batch, micros, range(3), max_tokens=7)


def test_a_single_sequence_over_the_budget_stands_alone():
    batch = batch_of([([1, 2, 3], [[4] * 9, [5]]), ([6], [[7]])])
    micros = pack(batch, max_tokens=4)
    assert sorted(m.num_rows for m in micros) == [4, 11]
    check(batch, micros, range(3), max_tokens=4)


@pytest.mark.parametrize("seed", range(30))
def test_random_batches(seed):
    """Rows are exactly the distinct prefixes per micro-batch; budget, order and coverage hold for any subset."""
    rng = random.Random(seed)
    distinct = rng.choice([1, 2, 3, 50])

    def tokens(low, high):
        return [rng.randrange(distinct) for _ in range(rng.randint(low, high))]

    groups = [(tokens(1, 6), [tokens(0, 8) for _ in range(rng.randint(1, 5))]) for _ in range(rng.randint(1, 6))]
    batch = batch_of(groups)
    sequences = [s for s in range(batch.num_sequences) if rng.random() < 0.8]
    extra = torch.tensor([rng.random() < 0.3 for _ in range(batch.num_sequences)])
    max_tokens = rng.choice([1, 5, 9, 20, 1000])
    micros = pack(batch, sequences, max_tokens=max_tokens, extra_row=extra)
    check(batch, micros, sequences, max_tokens=max_tokens, extra=[s for s in sequences if extra[s]])
    for micro in micros:
        inputs = set()
        for s in micro.sequences.tolist():
            prompt, response = groups[int(batch.group_index[s])][0], batch.response_ids.split(batch.lengths.tolist())[s]
            inputs.add((*prompt, *response.tolist()[: len(response) if extra[s] else -1]))
        prefixes = {path[:n] for path in inputs for n in range(1, len(path) + 1)}
        assert micro.num_rows == len(prefixes)
    again = pack(batch, torch.tensor(sequences, dtype=torch.int64), max_tokens=max_tokens, extra_row=extra)
    for a, b in zip(micros, again, strict=True):
        assert a.segments == b.segments
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.token_index, b.token_index)


@pytest.mark.parametrize("seed", range(20))
def test_keep_tokens(seed):
    """Any subset of tokens: each is still predicted by the row that has read what stands before it; no row is idle."""
    rng = random.Random(seed)

    def tokens(low, high):
        return [rng.randrange(rng.choice([2, 30])) for _ in range(rng.randint(low, high))]

    batch = batch_of([(tokens(1, 6), [tokens(1, 8) for _ in range(rng.randint(1, 5))]) for _ in range(3)])
    extra = torch.tensor([rng.random() < 0.1 for _ in range(batch.num_sequences)])
    (micro,) = pack(batch, max_tokens=1000, extra_row=extra)
    chosen = torch.tensor([rng.random() < 0.2 for _ in range(micro.num_tokens)])
    kept = keep_tokens(micro, chosen)
    if kept is None:
        assert not chosen.any()
        assert not extra.any()
        return
    assert kept.token_index.tolist() == micro.token_index[chosen].tolist()
    before = {t: path_of(micro, r) for r, t in zip(micro.head_index.tolist(), micro.token_index.tolist())}
    paths = [path_of(kept, row) for row in kept.head_index.tolist()]
    assert paths == [before[t] for t in kept.token_index.tolist()]
    bootstraps = [path_of(kept, row) for row in kept.bootstrap_index.tolist()]
    assert bootstraps == [path_of(micro, row) for row in micro.bootstrap_index.tolist()]
    assert kept.num_rows == len({path[:n] for path in [*paths, *bootstraps] for n in range(1, len(path) + 1)})


def test_keep_tokens_of_everything_and_nothing():
    (micro,) = pack(batch_of([([7, 8], [[1, 2], [3]])]), max_tokens=10)
    everything = keep_tokens(micro, torch.ones(3, dtype=torch.bool))
    assert everything.segments == micro.segments
    assert everything.head_index.tolist() == micro.head_index.tolist()
    assert keep_tokens(micro, torch.zeros(3, dtype=torch.bool)) is None


def test_few_micro_batches():
    """Groups of 6, 5, 4, 3, 2 rows fit two budgets of 10."""
    batch = batch_of([([g * 10 + i for i in range(size)], [[99]]) for g, size in enumerate([6, 5, 4, 3, 2])])
    assert sorted(m.num_rows for m in pack(batch, max_tokens=10)) == [10, 10]


def test_budgets_hold_to_the_row():
    """3 rows each, budget 8: two together, never three."""
    batch = batch_of([([g * 10, g * 10 + 1, g * 10 + 2], [[99]]) for g in range(5)])
    assert [m.num_rows for m in pack(batch, max_tokens=8)] == [6, 6, 3]
    assert [m.num_rows for m in pack(batch, max_tokens=9)] == [9, 6]


def test_wrong_arguments():
    with pytest.raises(DataError, match="prompt 0 of the batch has no tokens"):
        pack(batch_of([([], [[1]])]), max_tokens=10)
    with pytest.raises(ValueError, match="max_tokens = 0"):
        pack(batch_of([([1], [[1]])]), max_tokens=0)
    with pytest.raises(ValueError, match="2 entries for 1 sequences"):
        pack(batch_of([([1], [[1]])]), max_tokens=5, extra_row=torch.tensor([True, False]))


def test_optimizer_batches_by_whole_prompts():
    group_id = torch.tensor([5, 5, 9, 9, 9, 2, 7, 7])
    plans = plan_optimizer_batches(group_id, num_updates=2, seed=1)
    assert sorted(torch.cat(plans).tolist()) == list(range(8))
    of = [set(group_id[p].tolist()) for p in plans]
    assert not of[0] & of[1]
    assert sorted(map(len, of)) == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(plans, plan_optimizer_batches(group_id, num_updates=2, seed=1)))
    orders = {str([p.tolist() for p in plan_optimizer_batches(group_id, num_updates=2, seed=s)]) for s in range(20)}
    assert len(orders) > 3
    assert len(plan_optimizer_batches(group_id, num_updates=9, seed=0)) == 4


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_optimizer_batches_do_not_depend_on_ranks(num_ranks):
    """Whatever rank holds a prompt, it falls in the same optimizer batch."""
    group_id = torch.arange(12).repeat_interleave(3)
    whole = [set(group_id[p].tolist()) for p in plan_optimizer_batches(group_id, num_updates=4, seed=11)]
    parts = [
        plan_optimizer_batches(group_id[r::num_ranks], num_updates=4, seed=11, all_group_id=group_id.flip(0))
        for r in range(num_ranks)
    ]
    for u in range(4):
        held = set().union(*(group_id[r::num_ranks][parts[r][u]].tolist() for r in range(num_ranks)))
        assert held == whole[u]
