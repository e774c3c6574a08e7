"""Exact choices over an optimizer batch: the same tokens for one, two or four ranks, ties by sample id."""

import algorithm_oracles as oracle
import numpy as np
import pytest
import ragged_data
import torch

from fastrl.algorithms import get_policy_loss
from fastrl.algorithms.counter_random import random_bits, uniform
from fastrl.algorithms.entropy import AdaptiveEntropy, top_entropy_mask
from fastrl.algorithms.selection import ascending, descending, pick

LENGTHS = (3, 0, 5, 1, 4, 2, 6, 4, 9, 7, 8, 3)


def whole(seed, **changes):
    data = ragged_data.batch(seed, lengths=LENGTHS, groups=tuple(range(len(LENGTHS))))
    return data | changes


def split(data, owner):
    """The parts of a batch that each rank holds, with the flat positions of their tokens."""
    cu = data["cu_seqlens"]
    out = []
    for r in range(max(owner) + 1):
        rows = [s for s, o in enumerate(owner) if o == r]
        tokens = torch.cat([torch.arange(int(cu[s]), int(cu[s + 1])) for s in rows]) if rows else torch.zeros(0).long()
        part = {}
        for name, value in data.items():
            if isinstance(value, torch.Tensor) and name != "cu_seqlens":
                part[name] = value[tokens] if value.numel() == int(cu[-1]) else value[rows]
        lengths = cu.diff()[rows]
        part["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        out.append((part, tokens))
    return out


def over_ranks(data, owner, choose):
    """The mask over the whole batch that ranks, each with its part, choose together."""
    parts = split(data, owner)
    masks = ragged_data.on_ranks([lambda reduce, p=part: choose(p, reduce) for part, _ in parts])
    out = torch.zeros(int(data["cu_seqlens"][-1]), dtype=torch.bool)
    for (_, tokens), mask in zip(parts, masks):
        out[tokens] = mask
    return out


SPLITS = [[0] * 12, [0, 1] * 6, [3, 1, 0, 2, 2, 1, 0, 3, 3, 1, 2, 0]]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("k", [0, 1, 5, 17, 1000])
def test_pick_is_the_top_k(seed, k):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(300, generator=g)
    x[::7] = 0.5  # ties
    mask = torch.rand(300, generator=g) > 0.4
    ids = torch.randperm(300, generator=g)
    got = pick([descending(x), ascending(lambda index: ids[index], 32)], mask, k)
    order = sorted((i for i in range(300) if mask[i]), key=lambda i: (-float(x[i]), int(ids[i])))
    assert sorted(order[:k]) == got.nonzero()[:, 0].tolist()


def test_descending_orders_every_float():
    x = torch.tensor([float("inf"), 3e38, 1.5, 1e-40, 0.0, -0.0, -1e-40, -1.5, -3e38, float("-inf")])
    keys = descending(x)(torch.arange(len(x)))[0].tolist()
    assert keys == sorted(keys, reverse=True)
    assert keys[4] == keys[5] and len(set(keys)) == 9


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("owner", SPLITS)
def test_kl_cov_selects_the_largest_covariances_on_any_number_of_ranks(seed, owner):
    data = whole(seed)
    entry = get_policy_loss("kl_cov")
    got = over_ranks(data, owner, lambda p, reduce: entry.make_selection(p | {"reduce": reduce}, {"fraction": 0.2}))
    d = ragged_data.numpy(data)
    cov = oracle.covariance(d["advantages"], d["log_prob"], d["loss_mask"])
    count = max(int(0.2 * d["loss_mask"].sum()), 1)
    order = sorted((t for t in range(len(cov)) if d["loss_mask"][t]), key=lambda t: -cov[t])
    assert got.nonzero()[:, 0].tolist() == sorted(order[:count])


def test_kl_cov_takes_one_token_where_the_fraction_rounds_to_none():
    data = whole(0)
    assert int(get_policy_loss("kl_cov").make_selection(data, {}).sum()) == 1


@pytest.mark.parametrize("owner", SPLITS)
def test_ties_go_by_sample_id_and_position(owner):
    data = whole(0)
    t = data["log_prob"].numel()
    data["advantages"], data["log_prob"] = torch.ones(t).double(), torch.full((t,), -1.0).double()  # all covariances 0
    data["loss_mask"] = torch.ones(t, dtype=torch.bool)
    data["sample_id"] = torch.tensor([90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 3, 1])
    entry = get_policy_loss("kl_cov")
    got = over_ranks(data, owner, lambda p, reduce: entry.make_selection(p | {"reduce": reduce}, {"fraction": 6 / t}))
    cu = data["cu_seqlens"]
    want = [*range(int(cu[11]), int(cu[11]) + 3), *range(int(cu[10]), int(cu[10]) + 3)]  # samples 1 (3 tokens) and 3
    assert got.nonzero()[:, 0].tolist() == sorted(want)


def clip_cov_data(seed):
    data = whole(seed)
    data["advantages"], data["log_prob"] = data["advantages"] * 3, data["log_prob"] * 2
    data["old_log_prob"] = data["log_prob"] - 0.3 * torch.randn(data["log_prob"].numel()).double()
    return data


@pytest.mark.parametrize("seed", [0, 1])
def test_clip_cov_draws_among_the_candidates_only(seed):
    torch.manual_seed(seed)
    data = clip_cov_data(seed)
    d = ragged_data.numpy(data)
    cov = oracle.covariance(d["advantages"], d["log_prob"], d["loss_mask"])
    a, rho = d["advantages"], np.exp(d["log_prob"] - d["old_log_prob"])
    cut = -a * np.clip(rho, 0.8, 1.2) > -a * rho
    candidates = d["loss_mask"] & (cov > 1) & (cov < 5) & ~cut
    assert 3 <= candidates.sum() < len(cov)
    entry = get_policy_loss("clip_cov")
    seen = np.zeros(len(cov), dtype=int)
    for update in range(40):
        got = entry.make_selection(data | {"seed": 3, "update": update}, {"fraction": 2.5 / d["loss_mask"].sum()})
        assert int(got.sum()) == 2
        seen += got.numpy()
    assert (seen[~candidates] == 0).all() and (seen[candidates] > 0).sum() >= 3
    everyone = entry.make_selection(data, {"fraction": 1.0})  # more picks than candidates: all of them
    assert (everyone.numpy() == candidates).all()


@pytest.mark.parametrize("owner", SPLITS)
def test_clip_cov_draws_do_not_depend_on_ranks(owner):
    torch.manual_seed(7)
    data = clip_cov_data(2)
    entry = get_policy_loss("clip_cov")
    two = 2.5 / int(data["loss_mask"].sum())

    def choose(part, reduce):
        return entry.make_selection(part | {"seed": 5, "update": 2, "reduce": reduce}, {"fraction": two})

    alone = choose(data, None)
    assert torch.equal(over_ranks(data, owner, choose), alone)
    others = [entry.make_selection(data | {"seed": 5, "update": u}, {"fraction": two}) for u in range(3, 9)]
    assert not all(torch.equal(alone, other) for other in others)


def test_selection_options_and_loss_options_are_told_apart():
    entry = get_policy_loss("clip_cov")
    data = whole(1)
    options = {"fraction": 0.5, "clip_low": 0.1, "cov_low": 0.0}
    selection = entry.make_selection(data, options)
    assert entry.call(data | {"selection": selection}, options).loss.shape == selection.shape


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("owner", SPLITS)
def test_top_entropy_mask(owner, fraction):
    data = whole(3)
    got = over_ranks(
        data, owner, lambda p, reduce: top_entropy_mask(p["entropy"], p["loss_mask"], fraction, reduce=reduce)
    )
    values = sorted(data["entropy"][data["loss_mask"]].tolist(), reverse=True)
    bar = values[int(np.ceil(fraction * len(values) - 1e-9)) - 1]
    assert torch.equal(got, data["loss_mask"] & (data["entropy"] >= bar))


def test_top_entropy_keeps_ties_and_survives_an_empty_mask():
    entropy = torch.tensor([1.0, 2.0, 2.0, 2.0])
    assert top_entropy_mask(entropy, torch.ones(4, dtype=torch.bool), 0.25).tolist() == [False, True, True, True]
    assert not top_entropy_mask(entropy, torch.zeros(4, dtype=torch.bool), 0.5).any()
    with pytest.raises(ValueError, match="fraction = 0"):
        top_entropy_mask(entropy, torch.ones(4, dtype=torch.bool), 0.0)


def test_uniform_numbers_are_uniform_and_independent_of_shape():
    u = uniform(11, 3, torch.arange(40000))
    assert abs(float(u.mean()) - 0.5) < 0.01 and abs(float(u.var()) - 1 / 12) < 0.002
    assert (torch.histc(u.float(), 20, 0, 1) / 2000 - 1).abs().max() < 0.1
    assert torch.equal(uniform(11, 3, torch.tensor([123, 5])), u[[123, 5]])
    assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 0.02
    assert not torch.equal(random_bits(1, 2, torch.arange(4)), random_bits(2, 1, torch.arange(4)))


def test_random_bits_are_splitmix64():
    """The finaliser of SplitMix64 in Python integers."""
    full = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & full
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & full
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((42 + golden) & full)
    for counter in (7, -3):
        state = mix((state * 0xBF58476D1CE4E5B9 & full) ^ mix((counter + golden) & full))
    assert int(random_bits(42, 7, torch.tensor([-3]))[0]) % (1 << 64) == state


def test_adaptive_entropy_steps_up_below_the_target_and_rests_above_it():
    controller = AdaptiveEntropy(0.01, target=0.5, step=0.005)
    assert controller.value == 0.01
    assert controller.update(0.3) == pytest.approx(0.015)
    assert controller.update(float("nan")) == pytest.approx(0.015)
    assert controller.update(0.8) == 0.0  # above the target: no bonus, the coefficient falls
    assert controller.coef == pytest.approx(0.010)
    other = AdaptiveEntropy(0.0, target=0.5, step=0.005)
    other.load_state_dict(controller.state_dict())
    assert other.value == 0.0 and other.update(0.4) == pytest.approx(0.015)
    for _ in range(1000):
        other.update(9.0)
    assert other.coef == 0.0
    with pytest.raises(ValueError, match="target"):
        AdaptiveEntropy(0.1, target=-1.0)
