"""Assignments of sequences to ranks: costs by hand, small cases against all assignments, big ones against the bound."""

import itertools
import random

import pytest

from fastrl.data.balance import CostModel, balance, keep_at_home, largest_differencing, refine

COST = CostModel(row=2.0, head_row=3.0, key=0.5)


def recomputed_loads(prompts, lengths, groups, ranks, num_ranks, cost, share=True):
    """Row by row: each rank computes the prompt positions of its groups once, then its responses."""
    loads = [0.0] * num_ranks
    paid = set()
    for s, (p, n, g) in enumerate(zip(prompts, lengths, groups)):
        r = ranks[s]
        if not n:
            continue
        if not share or (r, g) not in paid:
            paid.add((r, g))
            loads[r] += sum(cost.row + cost.key * (position + 1) for position in range(p))
        loads[r] += sum(cost.row + cost.key * (position + 1) for position in range(p, p + n - 1)) + cost.head_row * n
    return loads


def test_costs_by_hand():
    assert COST.rows(0, 3) == 3 * 2 + 0.5 * (1 + 2 + 3)
    assert COST.rows(3, 3) == 0
    assert COST.response(3, 2) == 2 + 0.5 * 4 + 2 * 3  # one row at position 3 that reads 4 keys, two head rows
    assert COST.response(3, 1) == 3  # its token is predicted by the prompt's last row


def test_differencing_by_hand():
    """8 7 6 5 4 in two parts: 8-7, 6-5, 4 -> 1 1 4 -> 3 1 -> 2: the textbook's 16 against 14."""
    costs = [8, 7, 6, 5, 4]
    sums = sorted(sum(costs[i] for i in part) for part in largest_differencing(costs, 2))
    assert sums == [14, 16]
    assert sorted(sum(costs[i] for i in part) for part in refine(largest_differencing(costs, 2), costs)) == [15, 15]
    assert largest_differencing([], 3) == [[], [], []]


@pytest.mark.parametrize(("num_parts", "num_items"), [(2, 9), (3, 7)])
def test_small_cases_against_every_assignment(num_parts, num_items):
    generator, over = random.Random(7), []
    for _ in range(60):
        costs = [generator.lognormvariate(4, 1) for _ in range(num_items)]
        found = max(sum(costs[i] for i in p) for p in refine(largest_differencing(costs, num_parts), costs))
        best = min(
            max(sum(c for c, a in zip(costs, (0, *rest)) if a == part) for part in range(num_parts))
            for rest in itertools.product(range(num_parts), repeat=num_items - 1)
        )
        assert best * (1 - 1e-12) <= found <= best * 1.15
        over.append(found / best)
    assert sum(over) / len(over) < 1.015
    assert sum(ratio < 1 + 1e-9 for ratio in over) >= 30


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_big_case_reaches_the_lower_bound(num_ranks):
    generator = random.Random(1)
    lengths = [int(generator.lognormvariate(6, 1)) + 1 for _ in range(4096)]
    groups = [i // 8 for i in range(4096)]
    prompts = [[120, 260, 75][g % 3] for g in groups]
    found = balance(prompts, lengths, groups, num_ranks, cost=CostModel(1.0, 0.2, 1e-4))
    assert found.num_split_groups == 0
    assert found.imbalance < 1e-3
    assert max(found.loads) < found.lower_bound * 1.001
    again = recomputed_loads(prompts, lengths, groups, found.rank, num_ranks, CostModel(1.0, 0.2, 1e-4))
    assert found.loads == pytest.approx(again, rel=1e-9)


def test_one_group_is_split_only_where_it_may_be():
    prompts, lengths, groups = [10] * 8, [20, 18, 22, 19, 21, 20, 20, 20], [5] * 8
    whole = balance(prompts, lengths, groups, 4, cost=COST, whole_groups=True)
    assert len(set(whole.rank)) == 1 and whole.imbalance == pytest.approx(3.0)
    split = balance(prompts, lengths, groups, 4, cost=COST)
    assert sorted(split.rank.count(r) for r in range(4)) == [2, 2, 2, 2]
    assert split.imbalance <= 0.05 and split.num_split_groups == 1
    assert split.loads == pytest.approx(recomputed_loads(prompts, lengths, groups, split.rank, 4, COST), rel=1e-12)


def test_no_more_sequences_leave_than_the_tolerance_asks():
    """Two equal groups on two ranks stay; a third equal one is cut in two halves."""
    two = balance([10] * 8, [20] * 8, [1] * 4 + [2] * 4, 2, cost=COST)
    assert two.num_split_groups == 0 and two.imbalance == 0
    three = balance([10] * 12, [20] * 12, [1] * 4 + [2] * 4 + [3] * 4, 2, cost=COST)
    assert three.num_split_groups == 1
    assert sorted(three.rank.count(r) for r in range(2)) == [6, 6]
    loose = balance([10] * 12, [20] * 12, [1] * 4 + [2] * 4 + [3] * 4, 2, cost=COST, tolerance=0.5)
    assert loose.num_split_groups == 0


def test_few_long_sequences_per_rank_are_swapped_into_place():
    """8 sequences a rank, the longest as long as the mean load: moves alone stop at 28 % above the bound."""
    generator = random.Random(0)
    groups = [i // 16 for i in range(512)]
    prompt_of = [generator.randint(32, 512) for _ in range(groups[-1] + 1)]
    lengths = [max(1, int(generator.lognormvariate(6, 1))) for _ in groups]
    cost = CostModel(row=1.0, head_row=0.0835, key=3e-5)
    prompts = [prompt_of[g] for g in groups]
    found = balance(prompts, lengths, groups, 64, cost=cost)
    assert found.imbalance <= 0.06
    assert found.loads == pytest.approx(recomputed_loads(prompts, lengths, groups, found.rank, 64, cost), rel=1e-9)


def test_random_small_batches_hold_what_they_promise():
    generator = random.Random(3)
    for _ in range(60):
        num_ranks = generator.choice([1, 2, 3, 4, 8])
        sizes = [generator.randint(1, 5) for _ in range(generator.randint(0, 7))]
        groups = [g * 10 for g, n in enumerate(sizes) for _ in range(n)]
        prompt_of = {g: generator.randint(1, 30) for g in groups}
        prompts = [prompt_of[g] for g in groups]
        lengths = [generator.choice([0, 1, generator.randint(2, 60)]) for _ in groups]
        share, whole = generator.random() < 0.7, generator.random() < 0.3
        found = balance(prompts, lengths, groups, num_ranks, cost=COST, share_prompts=share, whole_groups=whole)
        loads = recomputed_loads(prompts, lengths, groups, found.rank, num_ranks, COST, share)
        assert found.loads == pytest.approx(loads, rel=1e-9, abs=1e-9)
        assert max(loads) >= found.lower_bound * (1 - 1e-9)
        holders = {g: {r for r, h in zip(found.rank, groups) if h == g} for g in groups}
        if whole:
            assert all(len(ranks) == 1 for ranks in holders.values())
        assert found.num_split_groups == sum(len(ranks) > 1 for ranks in holders.values())


def test_a_sequence_longer_than_a_rank_s_share_is_the_bound():
    found = balance([4] * 5, [1000, 5, 6, 7, 5], [1, 2, 2, 3, 3], 2, cost=COST)
    assert max(found.loads) == found.lower_bound
    assert found.rank.count(found.rank[0]) == 1


def test_names_of_ranks_keep_sequences_at_home():
    assert keep_at_home([0, 0, 1, 1], [1, 1, 0, 0], [1.0] * 4, 2) == [1, 1, 0, 0]
    assert keep_at_home([2, 0, 1], [2, 2, 2], [1.0, 5.0, 2.0], 3)[1] == 2
    assert sorted(keep_at_home([2, 0, 1], [2, 2, 2], [1.0, 5.0, 2.0], 3)) == [0, 1, 2]
    assert keep_at_home([], [], [], 2) == []
