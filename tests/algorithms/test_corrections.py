"""Rollout correction: weights, rejections and presets against loop oracles and by hand."""

import math

import algorithm_oracles as oracle
import numpy as np
import pytest
import ragged_data
import torch

from fastrl.algorithms import check_options, get_correction, list_corrections
from fastrl.errors import ConfigError

FIELDS = ("old_log_prob", "rollout_log_prob", "response_mask", "cu_seqlens")


def correct(data, **options):
    return get_correction("token_truncate").call(data, options)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_match_the_oracle(level, form, seed):
    data = ragged_data.batch(seed)
    data["rollout_log_prob"][4] = torch.nan
    d = ragged_data.numpy(data)
    options = {"level": level, "form": form, "cap": 1.1, "low": 0.9, "high": 1.2}
    got = correct(data, **options)
    want = oracle.correction_weight(*(d[f] for f in FIELDS), **options)
    mask = d["response_mask"]
    np.testing.assert_allclose(got.weight.numpy()[mask], want[mask], rtol=1e-9)
    assert torch.equal(got.keep, data["response_mask"]) and not got.weight.requires_grad
    count = float(mask.sum())
    total, tokens = got.stats["rollout_weight"]
    assert float(total) == pytest.approx(want[mask].sum()) and float(tokens) == count
    assert tuple(map(float, got.stats["tokens_without_log_prob"])) == (float(mask[4]), count)


@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rejections_match_the_oracle(statistic, level, seed):
    data = ragged_data.batch(seed)
    d = ragged_data.numpy(data)
    rule = {"statistic": statistic, "level": level, "upper": 1.3 if statistic == "k1" else 0.05}
    if statistic == "k1":
        rule["lower"] = 0.7
    got = correct(data, rejection=[rule])
    want = oracle.rejection(*(d[f] for f in FIELDS), **rule)
    assert (got.keep.numpy() == want).all()
    mask = d["response_mask"]
    name = f"{level}_{statistic}"
    assert tuple(map(float, got.stats[f"rejected_tokens/{name}"])) == (mask.sum() - want.sum(), mask.sum())


def test_all_rules_must_pass():
    data = ragged_data.batch(1)
    rules = [
        {"statistic": "k1", "level": "token", "lower": 0.8, "upper": 1.25},
        {"statistic": "k3", "level": "seq_mean", "upper": 0.08},
    ]
    both = correct(data, rejection=rules).keep
    assert torch.equal(both, correct(data, rejection=rules[:1]).keep & correct(data, rejection=rules[1:]).keep)


def ratios(*values, lengths=None):
    w = torch.tensor(values, dtype=torch.float64)
    lengths = [len(values)] if lengths is None else lengths
    return {
        "old_log_prob": w.log() - 3.0,
        "rollout_log_prob": torch.full_like(w, -3.0),
        "response_mask": torch.ones(len(values), dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths).tolist()]),
    }


def test_bounds_of_k1_are_ratios_of_trainer_over_engine():
    data = ratios(0.5, 2.0)
    assert correct(data, rejection=[{"statistic": "k1", "level": "token", "lower": 1.0}]).keep.tolist() == [False, True]
    assert correct(data, rejection=[{"statistic": "k1", "level": "token", "upper": 1.0}]).keep.tolist() == [True, False]


def test_weights_by_hand():
    data = ratios(4.0, 0.5)
    assert correct(data).weight.tolist() == pytest.approx([2.0, 0.5])
    assert correct(data, level="sequence", cap=10.0).weight.tolist() == pytest.approx([2.0, 2.0])
    assert correct(data, level="geometric").weight.tolist() == pytest.approx([math.sqrt(2)] * 2)
    assert correct(data, form="mask", low=0.6, high=5.0).weight.tolist() == pytest.approx([4.0, 0.0])
    assert correct(data, level="none").weight is None


def test_extreme_gaps_are_clamped():
    data = ratios(1.0, 1.0)
    data["rollout_log_prob"] = torch.tensor([-500.0, 200.0], dtype=torch.float64)
    assert correct(data, cap=1e9).weight.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_outlier_token_rejects_its_sequence():
    data = ratios(1.0, 5e-5, 1.0, 1.0, lengths=[2, 2])
    result = get_correction("reject_outliers_token_truncate").call(data)
    assert result.keep.tolist() == [False, False, True, True]
    assert tuple(map(float, result.stats["rejected_sequences/seq_max_k1"])) == (1.0, 2.0)
    high = correct(data, outlier_high=0.5)
    assert not high.keep.any()


def test_off_policy_sequences_with_negative_advantage_leave():
    data = ratios(0.5, 0.5, 0.5, 0.5, 1.0, 1.0, lengths=[2, 2, 2])
    data["advantages"] = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    result = get_correction("off_policy_mask").call(data)
    assert result.keep.tolist() == [True, True, False, False, True, True] and result.weight is None
    assert tuple(map(float, result.stats["rejected_sequences/off_policy"])) == (1.0, 3.0)
    with pytest.raises(ValueError, match="advantages"):
        correct(ratios(1.0), off_policy_delta=0.1)


def test_batch_normalised_weights_have_mean_one_over_all_ranks():
    parts = [ratios(1.5, 0.5, 1.0), ratios(0.25)]
    results = ragged_data.on_ranks([lambda r, p=p: correct(p | {"reduce": r}, batch_normalize=True) for p in parts])
    mean = (1.5 + 0.5 + 1.0 + 0.25) / 4
    assert results[0].weight.tolist() == pytest.approx([1.5 / mean, 0.5 / mean, 1.0 / mean])
    assert results[1].weight.tolist() == pytest.approx([0.25 / mean])


def test_token_weights_need_no_borders_and_sequences_do():
    data = ratios(4.0, 0.5)
    data["cu_seqlens"] = None
    assert correct(data).weight.tolist() == pytest.approx([2.0, 0.5])
    with pytest.raises(ValueError, match="cu_seqlens"):
        correct(data, level="sequence")


def test_masked_and_empty_sequences():
    data = ratios(4.0, math.nan, 0.5, lengths=[0, 2, 0, 1])
    data["response_mask"] = torch.tensor([True, False, False])
    result = get_correction("reject_geometric_sequence_truncate").call(data)
    assert result.keep.tolist() == [False, False, False]
    assert torch.isfinite(result.weight).all()
    nothing = {k: (v[:0] if k != "cu_seqlens" else torch.tensor([0])) for k, v in data.items()}
    assert get_correction("reject_geometric_sequence_truncate").call(nothing).keep.numel() == 0


def test_presets_say_what_they_need():
    needs = {name: get_correction(name).needs_with() for name in list_corrections()}
    assert needs["none"] == frozenset()
    assert needs["token_truncate"] == needs["token_mask"] == needs["icepop"] == {"rollout_log_prob"}
    for name in needs.keys() - {"none", "token_truncate", "token_mask", "icepop"}:
        assert needs[name] == {"rollout_log_prob", "old_log_prob"}, name
    assert get_correction("token_truncate").needs_with({"batch_normalize": True}) == {
        "rollout_log_prob",
        "old_log_prob",
    }
    assert get_correction("sequence_mask").options["level"][1] == "sequence"
    assert get_correction("token_truncate").options["cap"][1] == 2.0


@pytest.mark.parametrize("name", sorted(set(list_corrections()) - {"off_policy_mask"}))
def test_presets_run_and_change_nothing_where_the_policies_agree(name):
    data = ratios(1.0, 1.0, 1.0, lengths=[2, 1])
    result = get_correction(name).call(data)
    assert result.keep.all()
    assert result.weight is None or result.weight.tolist() == [1.0, 1.0, 1.0]


BAD = [
    ({"cap": 0.0}, "cap = 0.0 must be positive"),
    ({"low": 3.0, "high": 2.0}, "low = 3.0 and high = 2.0"),
    ({"level": "sequenc"}, "did you mean sequence"),
    ({"rejection": [{"statistic": "k4", "level": "token", "upper": 1.0}]}, "rejection.statistic = 'k4'"),
    ({"rejection": [{"statistic": "k1", "level": "seq_men", "upper": 1.0}]}, "did you mean seq_mean"),
    ({"rejection": [{"statistic": "k3", "level": "token", "lower": 0.1, "upper": 1.0}]}, "one upper bound"),
    ({"rejection": [{"statistic": "k1", "level": "token"}]}, "give lower, upper or both"),
    ({"rejection": [{"statistic": "k1", "level": "token", "lower": 2.0, "upper": 1.0}]}, "the lower one first"),
    ({"rejection": [{"statistic": "k1", "level": "token", "uper": 1.0}]}, "did you mean upper"),
    ({"outlier_low": -1.0}, "must be positive"),
    ({"caps": 1.0}, "did you mean cap"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_options(get_correction("token_truncate"), options)
