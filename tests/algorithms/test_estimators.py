"""Advantage estimators against loop oracles, and the edge rules by hand."""

import algorithm_oracles as oracle
import numpy as np
import pytest
import ragged_data
import torch

from fastrl.algorithms import get_advantage, list_advantages
from fastrl.algorithms.advantages.reinforce import RunningBaseline
from fastrl.algorithms.ragged import spread
from fastrl.errors import ConfigError
from fastrl.kernels import whiten

SEEDS = [0, 1, 2]


def close(got, want, tol=1e-9):
    np.testing.assert_allclose(np.asarray(got.detach().double()), want, rtol=tol, atol=tol)


SEQUENCE_CASES = {
    "grpo": ({}, lambda d: oracle.grpo(d["scores"], d["group_id"], d["valid"])),
    "dr_grpo": ({}, lambda d: oracle.grpo(d["scores"], d["group_id"], d["valid"], std_normalize=False)),
    "grpo/loo": (
        {"baseline": "leave_one_out", "ddof": 0, "epsilon": 0.1},
        lambda d: oracle.grpo(d["scores"], d["group_id"], d["valid"], leave_one_out=True, ddof=0, eps=0.1),
    ),
    "rloo": ({}, lambda d: oracle.rloo(d["scores"], d["group_id"], d["valid"])),
    "reinforce": ({}, lambda d: np.where(d["valid"], d["scores"], 0.0)),
    "reinforce_plus_plus_baseline": (
        {},
        lambda d: oracle.grpo(d["scores"], d["group_id"], d["valid"], std_normalize=False),
    ),
    "opo": ({}, lambda d: oracle.opo(d["scores"], d["group_id"], d["valid"], d["lengths"])),
    "gpg": ({"f_norm": 2.0}, lambda d: oracle.gpg(d["scores"], d["group_id"], d["valid"], 2.0)),
    "pass_at_k": ({}, lambda d: oracle.pass_at_k(d["scores"], d["group_id"], d["valid"])),
    "pass_at_k/plain": (
        {"std_normalize": False},
        lambda d: oracle.pass_at_k(d["scores"], d["group_id"], d["valid"], std_normalize=False),
    ),
    "gdpo": (
        {"weights": {"right": 1.0, "format": 0.5}},
        lambda d: oracle.gdpo(d["components"], d["group_id"], d["valid"], {"right": 1.0, "format": 0.5}),
    ),
    "max_rl": ({}, lambda d: oracle.max_rl(d["scores"], d["group_id"], d["valid"])),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", SEQUENCE_CASES)
def test_sequence_estimators_match_the_oracle(case, seed):
    options, want = SEQUENCE_CASES[case]
    entry = get_advantage(case.split("/")[0])
    data = ragged_data.batch(seed)
    assert entry.level == "sequence"
    close(entry.call(data, options), want(ragged_data.numpy(data)))


@pytest.mark.parametrize("case", SEQUENCE_CASES)
def test_sequence_estimators_do_not_read_invalid_samples(case):
    options, _ = SEQUENCE_CASES[case]
    entry = get_advantage(case.split("/")[0])
    data = ragged_data.batch(4)
    data["valid"][3] = False
    before = entry.call(data, options)
    data["scores"][3] = torch.nan
    data["components"]["right"][3] = torch.nan
    after = entry.call(data, options)
    assert torch.equal(before, after) and after[3] == 0


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("std_level", ["group", "batch", "none"])
@pytest.mark.parametrize("mean_level", ["group", "batch", "none"])
def test_normalize_matches_the_oracle(mean_level, std_level, leave_one_out):
    options = {"mean_level": mean_level, "std_level": std_level, "leave_one_out": leave_one_out, "ddof": 0}
    data = ragged_data.batch(1)
    d = ragged_data.numpy(data)
    want = oracle.normalize(d["scores"], d["group_id"], d["valid"], eps=1e-6, **options)
    close(get_advantage("normalize").call(data, options), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_matches_the_oracle_in_every_form(seed):
    data = ragged_data.batch(seed)
    d = ragged_data.numpy(data)
    entry = get_advantage("gae")
    forms = [
        ({"gamma": 0.9, "gae_lambda": 0.8}, {"gamma": 0.9, "lam": 0.8}),
        ({"gamma": 0.9, "gae_lambda": 0.8, "value_lambda": 1.0}, {"gamma": 0.9, "lam": 0.8, "value_lam": 1.0}),
        ({"length_adaptive_lambda": 0.5}, {"gamma": 1.0, "lam": 1.0, "alpha": 0.5}),
        (
            {"bootstrap_truncated": True, "gae_lambda": 0.7},
            {"gamma": 1.0, "lam": 0.7, "bootstrap": d["bootstrap_values"]},
        ),
    ]
    for options, kwargs in forms:
        want = oracle.gae(d["token_level_rewards"], d["values"], d["response_mask"], d["cu_seqlens"], **kwargs)
        for got, expected in zip(entry.call(data, options), want):
            close(got, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_token_estimators_match_the_oracle(seed):
    data = ragged_data.batch(seed)
    d = ragged_data.numpy(data)
    rewards, mask, cu = d["token_level_rewards"], d["response_mask"], d["cu_seqlens"]
    returns = oracle.reward_to_go(rewards, mask, cu, 0.9)
    for got in get_advantage("reinforce_plus_plus").call(data, {"gamma": 0.9}):
        close(got, returns)
    for got, want in zip(get_advantage("remax").call(data), oracle.remax(rewards, mask, cu, d["greedy_scores"])):
        close(got, want)
    entry = get_advantage("optimal_token_baseline")
    for weight in (None, "rollout_weight"):
        data["rollout_weight"] = None if weight is None else ragged_data.batch(seed)[weight]
        want = oracle.optimal_token_baseline(
            rewards,
            mask,
            cu,
            d["group_id"],
            d["old_log_prob"],
            d["sum_sq"],
            None if weight is None else d[weight],
            d["valid"],
        )
        for got, expected in zip(entry.call(data), want):
            close(got, expected)


def test_optimal_token_baseline_by_hand():
    # one group, responses of 2 and 1 tokens, probabilities 1/2 and sum of squares 1/2: w = 1 - 1 + 1/2 = 1/2 each
    half = torch.full((3,), 0.5, dtype=torch.float64)
    advantages, returns = get_advantage("optimal_token_baseline").call(
        {
            "token_level_rewards": torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64),
            "response_mask": torch.ones(3, dtype=torch.bool),
            "cu_seqlens": torch.tensor([0, 2, 3]),
            "group_id": torch.tensor([4, 4]),
            "old_log_prob": half.log(),
            "sum_sq": half,
        },
        {"epsilon": 0.0},
    )
    # position 0: B = (2 x 1/2 + 1 x 1/2) / 1 = 1.5; position 1 belongs to the longest response alone: B = 0
    close(returns, [2.0, 2.0, 1.0])
    close(advantages, [0.5, 2.0, -0.5])


GROUP_ESTIMATORS = [
    "grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "grpo_passk", "max_rl", "normalize",
    "reinforce_plus_plus_baseline",
]  # fmt: skip


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_group_of_one_and_equal_scores_give_exactly_zero(name):
    data = {
        "scores": torch.tensor([3.5, 0.95, 0.95, 0.95, 0.1, 0.1, 0.1, 1.0, 1.0 - 6e-8]),
        "group_id": torch.tensor([7, 1, 1, 1, 2, 2, 2, 3, 3]),
        "lengths": torch.arange(1, 10),
        "valid": torch.ones(9, dtype=torch.bool),
    }
    assert torch.equal(get_advantage(name).call(data), torch.zeros(9))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("scores", [[1.0, 1.0 + 3e-6], [1e6, 1e6 + 3]])
def test_a_little_more_spread_than_none_counts(name, scores):
    data = {
        "scores": torch.tensor(scores, dtype=torch.float64),
        "group_id": torch.tensor([4, 4]),
        "lengths": torch.tensor([2, 3]),
        "valid": torch.ones(2, dtype=torch.bool),
    }
    assert get_advantage(name).call(data)[1] > 0


def test_gdpo_group_of_one_and_abstaining_sample():
    data = {
        "components": {"a": torch.tensor([1.0, 0.0, 5.0]), "b": torch.tensor([torch.nan, 2.0, 5.0])},
        "group_id": torch.tensor([0, 0, 1]),
    }
    # a: +-0.5 / (0.70711 + 1e-6); b has one sample that did not abstain: 0
    close(get_advantage("gdpo").call(data), [0.7071058, -0.7071058, 0.0], 1e-6)


def test_pass_at_k_ties_and_runner_up():
    data = {"scores": torch.tensor([1.0, 1.0, 0.0, 3.0, 1.0, 2.0]), "group_id": torch.tensor([0, 0, 0, 1, 1, 1])}
    assert get_advantage("pass_at_k").call(data, {"std_normalize": False}).tolist() == [0, 0, 0, 1, 0, 0]


def test_max_rl_is_zero_where_the_mean_is_not_positive():
    data = {"scores": torch.tensor([-1.0, 0.5, 0.0, 1.0]), "group_id": torch.tensor([0, 0, 1, 1])}
    assert get_advantage("max_rl").call(data).tolist() == [0, 0, -1, 1]


def test_opo_weighs_the_baseline_by_length():
    data = {"scores": torch.tensor([1.0, 0.0]), "group_id": torch.tensor([0, 0]), "lengths": torch.tensor([30, 10])}
    assert get_advantage("opo").call(data).tolist() == [0.25, -0.75]


def test_gpg_scales_up_by_the_samples_that_scored_nothing():
    data = {"scores": torch.tensor([1.0, 0.0, 0.0, 0.0]), "group_id": torch.tensor([0, 0, 0, 0])}
    assert get_advantage("gpg").call(data).tolist() == [3.0, -1.0, -1.0, -1.0]


def test_gdpo_names_a_component_that_nobody_returns():
    data = {"components": {"format": torch.ones(2)}, "group_id": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=r"advantage_options\.weights\.fromat.*did you mean format"):
        get_advantage("gdpo").call(data, {"weights": {"fromat": 1.0}})


def test_running_baseline():
    data = {"scores": torch.tensor([1.0, 2.0]), "running_baseline": torch.tensor(0.5)}
    assert get_advantage("reinforce").call(data).tolist() == [1.0, 2.0]
    assert get_advantage("reinforce").call(data, {"baseline_decay": 0.9}).tolist() == [0.5, 1.5]
    baseline = RunningBaseline(0.9)
    assert baseline.update(2.0) == 2.0
    assert baseline.update(1.0) == pytest.approx(1.9)
    assert baseline.update(float("nan")) == pytest.approx(1.9)
    other = RunningBaseline(0.9)
    other.load_state_dict(baseline.state_dict())
    assert other.update(1.0) == pytest.approx(1.81)


def test_whitening_flags_and_the_whitened_result():
    flags = {name: get_advantage(name).whiten for name in list_advantages()}
    assert {name for name, on in flags.items() if on} == {
        "gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    }  # fmt: skip
    data = ragged_data.batch(3)
    d = ragged_data.numpy(data)
    scores = get_advantage("reinforce_plus_plus_baseline").call(data)
    tokens = spread(scores, data["cu_seqlens"], data["values"].numel())
    want = oracle.whiten(tokens.numpy(), d["response_mask"])
    close(whiten(tokens, data["response_mask"]), want)


@pytest.mark.parametrize("name", sorted(set(list_advantages())))
def test_empty_batches(name):
    data = ragged_data.batch(0, lengths=(), groups=())
    data = {k: v[:0] if isinstance(v, torch.Tensor) and k != "cu_seqlens" else v for k, v in data.items()}
    data["cu_seqlens"] = torch.tensor([0])
    data["components"] = {"right": torch.zeros(0)}
    result = get_advantage(name).call(data)
    for part in result if isinstance(result, tuple) else (result,):
        assert part.numel() == 0


@pytest.mark.parametrize("name", sorted(set(list_advantages())))
def test_integer_types_of_ids_and_borders_do_not_matter(name):
    data = ragged_data.batch(5)
    want = get_advantage(name).call(data)
    for key in ("cu_seqlens", "group_id", "lengths"):
        data[key] = data[key].int()
    got = get_advantage(name).call(data)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
        assert torch.equal(a, b)
