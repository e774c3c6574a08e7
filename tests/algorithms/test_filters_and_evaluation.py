"""Dynamic sampling, PF-PPO resampling, evaluation figures."""

import itertools
import math

import numpy as np
import pytest
import torch

from fastrl.algorithms.evaluation import best_at_k, bootstrap_interval, evaluate, majority_at_k, pass_at_k, worst_at_k
from fastrl.algorithms.filters import informative_groups
from fastrl.algorithms.groups import group_counts
from fastrl.algorithms.pf_ppo import resample, resampling_weights


def test_informative_groups():
    scores = torch.tensor([1.0, 1.0, 1.0 - 6e-8, 0.0, 1.0, 0.0, 0.0, 5.0, 2.0, 2.0])
    groups = torch.tensor([4, 4, 4, 1, 1, 2, 2, 3, 9, 9])
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 1]).bool()
    assert informative_groups(scores, groups, valid).tolist() == [False] * 3 + [True] * 2 + [False] * 5
    valid[3] = False  # then one sample of group 1 is left: nothing to compare
    assert not informative_groups(scores, groups, valid).any()


def test_group_counts():
    scores = torch.tensor([1.0, 1.0, 3.0, 0.0, 1.0, 2.0])
    groups = torch.tensor([0, 0, 1, 2, 2, 3])
    counts = group_counts(scores, groups, torch.tensor([1, 1, 1, 1, 1, 0]).bool())
    assert {k: (float(a), float(b)) for k, (a, b) in counts.items()} == {
        "groups_of_one": (1.0, 4.0),
        "groups_without_spread": (1.0, 4.0),
        "groups_without_samples": (1.0, 4.0),
    }


def test_resampling_weights():
    scores = torch.tensor([2.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    assert resampling_weights(scores, power=3.0).tolist() == [8.0, 1.0, 0.0, 8.0]
    assert resampling_weights(scores, mode="max_min").tolist() == [1.0, 1.0, 0.0, 1.0]
    assert resampling_weights(scores, mode="max_random").tolist() == [0.4, 0.1, 0.1, 0.4]
    valid = torch.tensor([False, True, True, False])
    assert resampling_weights(scores, valid, mode="max_min").tolist() == [0.0, 1.0, 1.0, 0.0]
    assert resampling_weights(torch.zeros(2)).tolist() == [1.0, 1.0]  # nobody is wanted more: all alike
    with pytest.raises(ValueError, match="mode = 'best'"):
        resampling_weights(scores, mode="best")


def test_resampling_follows_the_weights_and_its_address():
    scores = torch.tensor([1.0, 2.0, 0.0, 3.0])
    drawn = resample(scores, seed=1, update=5, count=20000, power=1.0)
    frequency = torch.bincount(drawn, minlength=4) / 20000
    assert frequency.tolist() == pytest.approx([1 / 6, 2 / 6, 0.0, 3 / 6], abs=0.01)
    assert torch.equal(drawn, resample(scores, seed=1, update=5, count=20000, power=1.0))
    assert not torch.equal(drawn, resample(scores, seed=1, update=6, count=20000, power=1.0))
    assert torch.equal(drawn[:7], resample(scores, seed=1, update=5, count=7, power=1.0))
    assert resample(scores, torch.zeros(4, dtype=torch.bool), seed=1, update=5).numel() == 0
    only = resample(scores, torch.tensor([False, False, True, False]), seed=1, update=5)
    assert only.tolist() == [2, 2, 2, 2]


def test_a_draw_on_the_border_never_takes_an_unwanted_sample(monkeypatch):
    monkeypatch.setattr(
        "fastrl.algorithms.pf_ppo.uniform", lambda seed, update, slots: torch.zeros(len(slots)).double()
    )
    assert resample(torch.tensor([0.0, 0.0, 1.0, 0.0]), seed=0, update=0).tolist() == [2, 2, 2, 2]


def test_pass_at_k_counts_subsets():
    for n, c, k in itertools.product(range(1, 8), range(8), range(1, 8)):
        if c > n or k > n:
            continue
        got = float(pass_at_k(torch.tensor([n]), torch.tensor([c]), k)[0])
        assert got == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)
    assert math.isnan(float(pass_at_k(torch.tensor([3]), torch.tensor([1]), 4)[0]))
    big = float(pass_at_k(torch.tensor([100000]), torch.tensor([37]), 1000)[0])
    exact = 1 - math.comb(100000 - 37, 1000) / math.comb(100000, 1000)
    assert big == pytest.approx(exact, rel=1e-9)


def test_best_worst_and_majority_average_over_subsets():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, generator=g, dtype=torch.float64)
    counts = torch.tensor([5, 4])
    for k in (1, 2, 3, 4):
        for row, n in enumerate((5, 4)):
            values = scores[row, :n].tolist()
            subsets = list(itertools.combinations(values, k))
            assert float(best_at_k(scores, counts, k)[row]) == pytest.approx(np.mean([max(s) for s in subsets]))
            assert float(worst_at_k(scores, counts, k)[row]) == pytest.approx(np.mean([min(s) for s in subsets]))
    assert best_at_k(scores, counts, 5).isnan().tolist() == [False, True]


def test_majority_by_hand():
    scores = torch.tensor([[1.0, 0.0, 1.0, 0.5], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    answers = torch.tensor([[7, 8, 7, 9], [1, 2, 3, 3]])
    counts = torch.tensor([4, 2])
    # row 0: answer 7 wins with score 1; row 1 has two samples, a tie of a right and a wrong answer
    assert majority_at_k(scores, answers, torch.tensor([4, 4]), 4).tolist() == [1.0, 0.0]
    assert majority_at_k(scores, answers, counts, 2, num_draws=4).tolist()[1] == pytest.approx(0.5)
    samples = [(7, 1.0), (8, 0.0), (7, 1.0), (9, 0.5)]
    exact = np.mean([vote(pair) for pair in itertools.combinations(samples, 2)])
    drawn = majority_at_k(scores[:1], answers[:1], counts[:1], 2, num_draws=4000)
    assert float(drawn[0]) == pytest.approx(exact, abs=0.02)


def vote(samples):
    """Mean score of the most frequent answers, each counted once."""
    votes = {answer: [s for a, s in samples if a == answer] for answer, _ in samples}
    most = max(len(v) for v in votes.values())
    return np.mean([np.mean(v) for v in votes.values() if len(v) == most])


def test_bootstrap_interval_has_the_width_of_the_normal_one():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, generator=g, dtype=torch.float64) + 3.0
    low, high = bootstrap_interval(x, num_draws=4000)
    half = 1.96 * float(x.std()) / 20
    assert low == pytest.approx(float(x.mean()) - half, abs=0.015)
    assert high == pytest.approx(float(x.mean()) + half, abs=0.015)
    assert (low, high) == bootstrap_interval(x, num_draws=4000)
    assert all(math.isnan(v) for v in bootstrap_interval(torch.tensor([torch.nan])))


def test_evaluate():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, torch.nan, torch.nan])
    groups = torch.tensor([3, 3, 5, 5, 8, 8, 8, 9])
    figures = evaluate(scores, groups, ["4", "5", "2", "2", "1", None, "x", "y"])
    assert figures["mean"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)  # prompt 9 has no scored sample
    assert figures["pass@1"] == pytest.approx(0.5)
    assert figures["pass@2"] == pytest.approx(2 / 3)
    assert figures["best@2"] == pytest.approx(2 / 3) and figures["worst@2"] == pytest.approx(1 / 3)
    assert figures["maj@2"] == pytest.approx(0.5)
    for name in ("mean", "pass@2", "best@2", "worst@2", "maj@2"):
        assert figures[f"{name}/low"] <= figures[name] <= figures[f"{name}/high"]
    single = evaluate(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    assert set(single) == {"mean", "mean/low", "mean/high"} and single["mean"] == 0.5
    assert evaluate(torch.tensor([torch.nan]), torch.tensor([0])) == {}
    assert evaluate(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == {}


def test_one_correct_of_four_passes_at_four():
    assert evaluate(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))["pass@4"] == 1.0
