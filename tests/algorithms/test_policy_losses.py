"""Policy losses against loop oracles: values, and gradients by central differences with stop gradients held fixed."""

import math

import algorithm_oracles as oracle
import numpy as np
import pytest
import ragged_data
import torch

from fastrl.algorithms import check_options, get_policy_loss, list_policy_losses
from fastrl.algorithms.ragged import sequence_index, sequence_sum
from fastrl.errors import ConfigError
from fastrl.kernels import aggregate, aggregation_scale

WIDE = {"clip_low": 0.2, "clip_high": 0.28}


def seq(fn, **k):
    return lambda x, c, d: fn(x, c, d["old_log_prob"], d["advantages"], d["loss_mask"], d["cu_seqlens"], **k)


def tok(fn, **k):
    return lambda x, c, d: fn(x, c, d["old_log_prob"], d["advantages"], **k)


CASES = {
    "clip": ({}, tok(oracle.clip)),
    "clip/higher": ({**WIDE, "dual_clip": None}, tok(oracle.clip, high=0.28, dual=None)),
    "clip/dual": ({"dual_clip": 1.2}, tok(oracle.clip, dual=1.2)),
    "clip/delta": ({"delta": 1.3}, tok(oracle.clip, delta=1.3)),
    "gspo": ({}, seq(oracle.gspo)),
    "gspo/wide": (WIDE, seq(oracle.gspo, low=0.2, high=0.28)),
    "gspo_token": (WIDE, seq(oracle.gspo, low=0.2, high=0.28, token=True)),
    "clip_sequence": (WIDE, seq(oracle.clip_sequence, low=0.2, high=0.28)),
    "luspo": (WIDE, seq(oracle.gspo, low=0.2, high=0.28)),
    "gmpo": ({}, seq(oracle.gmpo)),
    "geo_mean": ({"clip_low": 0.1, "clip_high": 0.4}, seq(oracle.gmpo, low=0.1, high=0.4)),
    "vespo": ({}, seq(oracle.vespo)),
    "cispo": (WIDE, tok(oracle.cispo, high=0.28)),
    "cispo/cap": ({"max_ratio": 1.1}, tok(oracle.cispo, cap=1.1)),
    "sapo": ({}, tok(oracle.sapo)),
    "sapo/tau": ({"tau_pos": 2.0, "tau_neg": 3.0}, tok(oracle.sapo, tau_pos=2.0, tau_neg=3.0)),
    "dppo_tv": ({"clip_low": 0.05, "clip_high": 0.03, "cap": 1.2}, tok(oracle.dppo_tv, low=0.05, high=0.03, cap=1.2)),
    "dppo_kl": ({"clip_low": 0.01, "clip_high": 0.02}, tok(oracle.dppo_kl, low=0.01, high=0.02)),
    "reinforce": ({}, tok(oracle.reinforce)),
    "gpg": ({}, tok(oracle.reinforce)),
    "dro": ({"beta": 0.3}, tok(oracle.dro, beta=0.3)),
    "kimi": ({"beta": 1.0}, tok(oracle.dro, beta=1.0)),
    "topr": ({}, tok(oracle.topr)),
    "cross_entropy": ({"mu": 0.5}, tok(oracle.cross_entropy, mu=0.5)),
    "positive_nll": ({}, tok(oracle.cross_entropy)),
    "ipo_mask": (
        {"max_difference": 0.05},
        lambda x, c, d: oracle.ipo_mask(x, c, d["old_log_prob"], d["advantages"], d["rollout_log_prob"], limit_p=0.05),
    ),
    "decoupled": (
        {"cap": 1.1},
        lambda x, c, d: oracle.decoupled(x, c, d["old_log_prob"], d["advantages"], d["rollout_log_prob"], cap=1.1),
    ),
    "decoupled/loglinear": (
        {"proximal": "loglinear"},
        lambda x, c, d: oracle.decoupled(
            x, c, d["old_log_prob"], d["advantages"], d["rollout_log_prob"], stale=d["staleness"]
        ),
    ),
    "clip_cov": (
        WIDE,
        lambda x, c, d: oracle.selected_clip(x, c, d["old_log_prob"], d["advantages"], d["selection"], high=0.28),
    ),
    "kl_cov": (
        {"coef": 0.7},
        lambda x, c, d: oracle.kl_cov(x, c, d["old_log_prob"], d["advantages"], d["selection"], coef=0.7),
    ),
}


def make(case, seed):
    name, (options, want) = case.split("/")[0], CASES[case]
    data = ragged_data.batch(seed)
    if name in ("gspo", "luspo", "clip_sequence"):  # sequence advantages, as these losses are meant
        data["advantages"] = torch.randn(8, dtype=torch.float64)[
            sequence_index(data["cu_seqlens"], data["values"].numel())
        ]
    if name == "decoupled":
        data["rollout_weight"] = None
    if name == "gmpo" or name == "geo_mean":
        data["rollout_weight"] = None
    data["selection"] = torch.rand(data["log_prob"].numel(), generator=torch.Generator().manual_seed(seed)) < 0.3
    return get_policy_loss(name), options, want, data


def test_every_registered_loss_has_a_case():
    ours = {name for name in list_policy_losses() if get_policy_loss(name).fn.__module__.startswith("fastrl.")}
    assert {case.split("/")[0] for case in CASES} == ours


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, seed):
    torch.manual_seed(seed)
    entry, options, want, data = make(case, seed)
    x = data["log_prob"].clone().requires_grad_()
    d = ragged_data.numpy(data)
    mask = d["loss_mask"]
    loss = entry.call(data | {"log_prob": x}, options).loss
    now = d["log_prob"]
    np.testing.assert_allclose(loss.detach().numpy()[mask], want(now, now, d)[mask], rtol=1e-9, atol=1e-9)
    weight = torch.randn(x.numel(), dtype=torch.float64) * data["loss_mask"]
    (loss * weight).sum().backward()
    numeric = np.zeros(x.numel())
    for t in range(x.numel()):
        step = np.zeros(x.numel())
        step[t] = 1e-6
        difference = want(now + step, now, d) - want(now - step, now, d)
        numeric[t] = (difference * weight.numpy()).sum() / 2e-6
    np.testing.assert_allclose(x.grad.numpy(), np.where(mask, numeric, 0.0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_masked_garbage_changes_nothing_and_gets_no_gradient(case):
    entry, options, _, data = make(case, 3)
    clean = entry.call(data, options).loss
    dirty = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
    for name in ("log_prob", "old_log_prob", "advantages", "rollout_log_prob"):
        dirty[name][~data["loss_mask"]] = (
            torch.tensor([torch.nan, torch.inf, -torch.inf, 300.0])
            .double()
            .repeat(9)[: int((~data["loss_mask"]).sum())]
        )
    x = dirty["log_prob"].requires_grad_()
    loss = entry.call(dirty | {"log_prob": x}, options).loss
    kept = data["loss_mask"]
    assert torch.equal(loss[kept], clean[kept])
    torch.where(kept, loss, torch.zeros_like(loss)).sum().backward()
    assert torch.isfinite(x.grad).all() and (x.grad[~kept] == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_no_gradient_goes_anywhere_else(case):
    entry, options, _, data = make(case, 0)
    for name in ("old_log_prob", "advantages", "rollout_log_prob"):
        data[name] = data[name].clone().requires_grad_()
    data["log_prob"] = data["log_prob"].clone().requires_grad_()
    result = entry.call(data, options)
    result.loss[data["loss_mask"]].sum().backward()
    assert data["log_prob"].grad is not None
    for name, value in result.stats.items():
        assert value.shape == result.loss.shape and not value.requires_grad, name


@pytest.mark.parametrize("case", CASES)
def test_float32_agrees_with_float64(case):
    entry, options, _, data = make(case, 1)
    low = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in data.items()}
    a, b = entry.call(low, options).loss, entry.call(data, options).loss
    assert a.dtype == torch.float32
    kept = data["loss_mask"]
    np.testing.assert_allclose(a[kept].numpy(), b[kept].numpy(), rtol=2e-5, atol=2e-6)


ON_POLICY = sorted(set(list_policy_losses()) - {"cross_entropy", "positive_nll", "dro", "kimi"})


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_gradient_is_the_policy_gradient(name):
    """With one update per batch every loss starts as -A log_prob (a sequence value spread over its tokens too)."""
    data = ragged_data.batch(2)
    owner = sequence_index(data["cu_seqlens"], data["values"].numel())
    data["advantages"] = torch.linspace(-1.5, 2.0, 8).double()[owner]
    data["selection"] = torch.zeros_like(data["loss_mask"])
    data["rollout_log_prob"] = data["old_log_prob"] = data["log_prob"].clone()
    data["rollout_weight"] = None
    x = data["log_prob"].clone().requires_grad_()
    entry = get_policy_loss(name)
    loss = entry.call(data | {"log_prob": x}, {}).loss
    lengths = data["lengths"]
    scale = aggregation_scale("seq-mean-token-mean", lengths, dtype=torch.float64)
    aggregate(loss, data["loss_mask"], scale=scale, cu_seqlens=data["cu_seqlens"]).backward()
    want = torch.where(data["loss_mask"], -data["advantages"] * scale[owner], 0.0)
    factor = 1.0 if name != "sapo" else None
    if factor is None:  # 4/tau sigmoid'(0) tau = 1
        factor = 1.0
    torch.testing.assert_close(x.grad, want * factor, rtol=1e-9, atol=1e-12)


def by_hand(name, options, log_ratios, advantages):
    data = {
        "log_prob": torch.tensor(log_ratios, dtype=torch.float64) - 1.0,
        "old_log_prob": torch.full((len(log_ratios),), -1.0, dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
    }
    return get_policy_loss(name).call(data, options)


def test_clip_statistics_by_hand():
    up, down = math.log(1.5), math.log(0.5)
    result = by_hand("clip", {}, [up, up, down, down, math.log(4.0)], [1.0, -1.0, 1.0, -1.0, -1.0])
    assert result.loss.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, 3.0])
    assert result.stats["clip_high"].tolist() == [1, 0, 0, 0, 0]
    assert result.stats["clip_low"].tolist() == [0, 0, 0, 1, 0]
    assert result.stats["dual_clip"].tolist() == [0, 0, 0, 0, 1]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    data = {
        "log_prob": torch.tensor([-1.0, -2.0], requires_grad=True),
        "old_log_prob": torch.tensor([-3.0, -1.0]),
        "advantages": torch.tensor([1.0, -1.0]),
    }
    get_policy_loss("cispo").call(data, {"clip_high": 1.0, "clip_low": 0.2}).loss.sum().backward()
    assert data["log_prob"].grad.tolist() == pytest.approx([-2.0, 0.8])


def test_topr_and_gate_by_hand():
    result = by_hand("topr", {}, [math.log(2.0), math.log(0.5)], [-1.0, -1.0])
    # log_prob = -1 + log ratio; weights 1 and 0.5
    assert result.loss.tolist() == pytest.approx([-1 + math.log(2.0), 0.5 * (-1 + math.log(0.5))])
    assert by_hand("sapo", {}, [0.0], [2.0]).loss.tolist() == pytest.approx([-4.0])  # f(1) = 2/tau = 2


def test_dppo_never_drops_a_token_that_moves_back():
    log_ratios = [math.log(0.999), math.log(1.001), math.log(0.999), math.log(1.001)]
    for name in ("dppo_tv", "dppo_kl"):
        result = by_hand(name, {"clip_low": 0.0, "clip_high": 0.0}, log_ratios, [1.0, 1.0, -1.0, -1.0])
        assert result.stats["clip_fraction"].tolist() == [0, 1, 1, 0], name


def test_sequence_losses_give_their_value_back_under_their_mode():
    data = ragged_data.batch(4)
    owner = sequence_index(data["cu_seqlens"], data["values"].numel())
    data["advantages"] = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[owner]
    data["rollout_weight"] = None
    mask, cu, lengths = data["loss_mask"], data["cu_seqlens"], data["lengths"]
    for name in ("gmpo", "clip_sequence", "gspo"):
        loss = get_policy_loss(name).call(data, {}).loss
        per_sequence = sequence_sum(loss, mask, cu) / lengths.clamp(min=1)
        assert get_policy_loss(name).loss_agg_mode == "seq-mean-token-mean"
        some = lengths > 0
        want = per_sequence[some].mean()
        got = aggregate(loss, mask, loss_agg_mode="seq-mean-token-mean", cu_seqlens=cu)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    luspo = get_policy_loss("luspo")
    loss = luspo.call(data, {}).loss
    gspo = sequence_sum(get_policy_loss("gspo").call(data, {}).loss, mask, cu) / lengths.clamp(min=1)
    got = aggregate(loss, mask, loss_agg_mode=luspo.loss_agg_mode, cu_seqlens=cu)
    torch.testing.assert_close(got, (lengths * gspo).sum() / (lengths > 0).sum())


def test_gmpo_reduces_token_weights_to_their_geometric_mean():
    data = ragged_data.batch(5)
    d = ragged_data.numpy(data)
    got = get_policy_loss("gmpo").call(data, {}).loss
    want = oracle.gmpo(
        d["log_prob"], d["log_prob"], d["old_log_prob"] , d["advantages"], d["loss_mask"], d["cu_seqlens"],
        weight=d["rollout_weight"],
    )  # fmt: skip
    np.testing.assert_allclose(got.numpy()[d["loss_mask"]], want[d["loss_mask"]], rtol=1e-9)


def test_decoupled_takes_the_corrections_weight_instead_of_its_own():
    _, _, _, data = make("decoupled", 0)
    data["rollout_weight"] = torch.full_like(data["log_prob"], 0.5)
    plain = get_policy_loss("clip").call(data, {"dual_clip": None}).loss
    torch.testing.assert_close(
        get_policy_loss("decoupled").call(data, {}).loss[data["loss_mask"]], 0.5 * plain[data["loss_mask"]]
    )


BAD_OPTIONS = [
    ("clip", {"dual_clip": 1.0}, "dual_clip = 1.0 must be above 1"),
    ("clip", {"clip_low": 1.0}, "clip_low = 1.0 must be at least 0 and below 1"),
    ("clip", {"clip_high": -0.1}, "clip_high = -0.1 must not be negative"),
    ("clip", {"delta": 1.1}, "delta = 1.1 must be at least"),
    ("clip", {"clip_hihg": 0.1}, "did you mean clip_high"),
    ("clip", {"clip_low": "wide"}, "must be a number"),
    ("dro", {}, "beta: dro needs a value"),
    ("dro", {"beta": -1.0}, "beta = -1.0 must be positive"),
    ("kimi", {"beta": 0}, "must be positive"),
    ("clip_cov", {"fraction": 0.0}, "fraction = 0.0"),
    ("clip_cov", {"cov_low": 5.0}, "cov_low = 5.0 must be below"),
    ("kl_cov", {"coef": -1.0}, "coef"),
    ("sapo", {"tau_pos": 0.0}, "tau_pos"),
    ("vespo", {"k_pos": -1.0}, "k_pos = -1.0"),
    ("ipo_mask", {"max_difference": 2.0}, "max_difference"),
    ("decoupled", {"proximal": "loglinar"}, "must be one of recompute, loglinear; did you mean loglinear"),
    ("cispo", {"max_ratio": 0.0}, "max_ratio"),
    ("cross_entropy", {"mu": 0.0}, "mu"),
    ("reinforce", {"clip_low": 0.1}, "takes no options"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD_OPTIONS)
def test_wrong_options_are_refused_with_the_key(name, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_options(get_policy_loss(name), options)
    assert "algorithm.policy_loss_options" in str(caught.value)


def test_modes_that_a_loss_is_defined_for():
    assert get_policy_loss("gmpo").only_loss_agg_modes == ("seq-mean-token-mean",)
    assert get_policy_loss("luspo").only_loss_agg_modes == ("seq-mean-token-sum",)
    assert get_policy_loss("vespo").only_loss_agg_modes == ("token-mean", "token-sum")
    assert get_policy_loss("clip").only_loss_agg_modes == ()


def test_needs_follow_the_options():
    decoupled = get_policy_loss("decoupled")
    assert decoupled.needs_with({}) == {"rollout_log_prob", "old_log_prob"}
    assert decoupled.needs_with({"proximal": "loglinear"}) == {"rollout_log_prob", "staleness"}
    assert get_policy_loss("clip").needs == frozenset()
    assert get_policy_loss("clip_cov").needs == {"pre_update_pass"}


def test_missing_data_is_named():
    with pytest.raises(KeyError, match="ipo_mask needs rollout_log_prob"):
        by_hand("ipo_mask", {}, [0.0], [1.0])
