"""group_normalize, whiten and masked_stats against float64 loops."""

import itertools

import kernel_oracles as oracle
import numpy as np
import pytest
import torch
from kernel_cases import LENGTHS, TRITON, close, cu, mask_of, normal, offsets_of, poisoned, seen

from fastrl.kernels import group_normalize, masked_stats, whiten

IDS = np.array([7, 7, -3, 7, 900, -3, 7, 5, 5, 5, 2**40, 2**40, 5, -3, 900, 11] * 3 + [12])


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_groups_equal_the_loop(scale, baseline):
    valid = mask_of(len(IDS), 1, 0.8)
    scores = poisoned(normal(len(IDS), 2), valid)
    for ddof in (0, 1):
        got = group_normalize(
            scores, torch.from_numpy(IDS), scale=scale, baseline=baseline, ddof=ddof, valid=torch.from_numpy(valid)
        )
        want = oracle.group_normalize(seen(scores), IDS, valid, scale=scale, baseline=baseline, ddof=ddof, eps=1e-6)
        close(got, want)


def test_many_samples_in_shuffled_order_and_int32_ids():
    count = 300
    rng = np.random.default_rng(4)
    ids = rng.permutation(np.repeat(np.arange(60), 5)).astype(np.int32)
    scores = torch.from_numpy(rng.integers(0, 2, count).astype(np.float32))
    got = group_normalize(scores, torch.from_numpy(ids))
    every = np.ones(count, dtype=bool)
    close(got, oracle.group_normalize(seen(scores), ids, every, scale="std", baseline="mean", ddof=1, eps=1e-6))


def test_no_spread_and_groups_of_one_are_exactly_zero():
    scores = torch.tensor([0.1, 0.1, 0.1, 1e6, 1e6 + 0.5, 5.0, 1.0, 1.0 + 2e-6])
    ids = torch.tensor([1, 1, 1, 2, 2, 3, 4, 4])
    got = group_normalize(scores, ids)
    assert got[:6].tolist() == [0.0] * 6  # 0.5 of 1e6 is within 1e-6 of it
    assert got[6] < 0 < got[7]
    alone = group_normalize(torch.tensor([3.0, 9.0]), torch.tensor([1, 1]), valid=torch.tensor([1, 0]))
    assert alone.tolist() == [0.0, 0.0]


def test_offsets_do_not_eat_the_variance():
    # two-pass: 1000 + {0, 1} has the std of {0, 1}; the one-pass formula in float32 is off by percents
    scores = torch.tensor([1000.0, 1001.0, 1000.0, 1001.0])
    got = group_normalize(scores, torch.zeros(4, dtype=torch.int64), eps=0.0)
    close(got, [-0.8660254, 0.8660254, -0.8660254, 0.8660254])


def test_a_bad_score_stays_in_its_group():
    got = group_normalize(torch.tensor([1.0, 2, float("nan"), 3]), torch.tensor([1, 1, 2, 2]))
    assert got.isnan().tolist() == [False, False, True, True]


def test_empty_group_normalize():
    assert group_normalize(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_group_arguments_are_named():
    s, g = torch.ones(3), torch.ones(3, dtype=torch.int64)
    for change, message in [
        ({"scale": "var"}, "scale = 'var': use one of std, none"),
        ({"baseline": "median"}, "baseline = 'median'"),
        ({"ddof": 2}, "ddof = 2: use 0 or 1"),
        ({"eps": -1.0}, "eps = -1.0"),
        ({"valid": torch.ones(2)}, r"valid has shape \[2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            group_normalize(s, g, **change)
    with pytest.raises(ValueError, match="group_id has dtype float32"):
        group_normalize(s, torch.ones(3))


@pytest.mark.parametrize(("total", "keep"), [(1, 1.0), (2, 1.0), (50, 0.03), (777, 0.6), (64, 0.0)])
def test_whiten_equals_the_loop(total, keep):
    mask = mask_of(total, 61, keep)
    x = poisoned(normal(total, 62, 3.0) + 5, mask)
    for ddof in (0, 1):
        close(whiten(x, torch.from_numpy(mask), ddof=ddof), oracle.whiten(seen(x), mask, ddof=ddof))
    got = whiten(x, torch.from_numpy(mask), mean=0.5, var=torch.tensor(4.0))
    close(got, oracle.whiten(seen(x), mask, mean=0.5, var=4.0))


def test_whiten_strided_half_and_without_mask():
    x = torch.from_numpy(normal(60, 63).reshape(6, 10)).to(torch.bfloat16).t()
    close(whiten(x), oracle.whiten(seen(x).ravel(), np.ones(60)).reshape(10, 6))
    assert whiten(torch.zeros(0)).shape == (0,)
    with pytest.raises(ValueError, match="var = None: give mean and var together"):
        whiten(x, mean=1.0)
    with pytest.raises(ValueError, match=r"var = -1.0: a finite number in \[0, inf\)"):
        whiten(x, mean=1.0, var=-1.0)


@pytest.mark.parametrize("keep", [0.7, 1.0, 0.0])
def test_stats_overall_and_per_sequence(keep):
    total = sum(LENGTHS)
    mask = mask_of(total, 71, keep)
    x = poisoned(normal(total, 72), mask)
    got = masked_stats(x, torch.from_numpy(mask))
    for value, want in zip(got, oracle.stats(seen(x), mask), strict=True):
        close(value, want)
    offsets = offsets_of(LENGTHS)
    rows = [oracle.stats(seen(x)[a:b], mask[a:b]) for a, b in itertools.pairwise(offsets)]
    got = masked_stats(x, torch.from_numpy(mask), cu_seqlens=cu(LENGTHS))
    assert got.count.dtype == torch.int64
    for value, want in zip(got, zip(*rows, strict=True), strict=True):
        close(value, want)


def test_stats_of_padded_rows_and_of_nothing():
    x = torch.from_numpy(normal(40, 73).reshape(4, 10)).float()
    mask = torch.ones(4, 10, dtype=torch.uint8)
    mask[2] = 0
    got = masked_stats(x.t().contiguous().t(), mask, per_sequence=True, ddof=0)
    rows = [oracle.stats(seen(x[i]), mask[i].tolist(), ddof=0) for i in range(4)]
    for value, want in zip(got, zip(*rows, strict=True), strict=True):
        close(value, want)
    nothing = masked_stats(torch.zeros(0))
    assert [v.item() for v in nothing] == [0, 0, 0, 0, float("inf"), float("-inf")]
    assert masked_stats(torch.zeros(0), cu_seqlens=torch.tensor([0])).sum.shape == (0,)


@pytest.mark.skipif(TRITON, reason="float64 always takes the reference")
def test_gradcheck_of_the_references():
    from fastrl.kernels.discounted_returns.reference import discounted_returns_reference
    from fastrl.kernels.group_normalize.reference import group_normalize_reference
    from fastrl.kernels.masked_stats.reference import masked_stats_reference
    from fastrl.kernels.whiten.reference import whiten_reference

    x = torch.from_numpy(normal(8, 81)).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1])
    ids = torch.tensor([1, 1, 1, 2, 2, 2, 2, 3])
    for leave in (False, True):
        torch.autograd.gradcheck(lambda x, l=leave: group_normalize_reference(x, ids, mask, True, l, 1, 1e-6), x)
    torch.autograd.gradcheck(lambda x: whiten_reference(x, mask, None, None, 1, 1e-8), x)
    torch.autograd.gradcheck(lambda x: discounted_returns_reference(x, mask, cu([3, 5]), 0.9), x)
    torch.autograd.gradcheck(lambda x: masked_stats_reference(x, mask, cu([3, 5]), True, 1)[2:4], x)
    torch.autograd.gradcheck(lambda x: masked_stats_reference(x, mask, None, False, 1)[2:4], x)
