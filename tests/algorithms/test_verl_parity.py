"""The numbers that a user moving from verl 0.9 expects unchanged, against its own functions; skipped without verl."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastrl.algorithms import get_advantage, get_kl, get_policy_loss
from fastrl.algorithms.aggregation import aggregation_scale
from fastrl.algorithms.kl import AdaptiveKL
from fastrl.algorithms.ragged import sequence_index
from fastrl.algorithms.value_loss import value_loss
from fastrl.kernels import aggregate, whiten

core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")

B, T = 12, 7


class Batch:
    """The same numbers padded, as verl takes them, and ragged."""

    def __init__(self, seed=0, holes=False):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, T + 1, (B,), generator=g)
        self.mask = (torch.arange(T)[None] < self.lengths[:, None]).double()
        self.inside = self.mask.bool()
        if holes:
            self.mask = self.mask * (torch.rand(B, T, generator=g) > 0.3)
            self.mask[:, 0] = 1
        self.cu = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self.group = torch.arange(B) % 4
        self.scores = torch.randint(0, 3, (B,), generator=g).double()
        self.normal = lambda: torch.randn(B, T, generator=g, dtype=torch.float64)
        self.old = -self.normal().abs() - 0.05
        self.log_prob = torch.minimum(self.old + 0.3 * self.normal(), torch.tensor(-1e-3).double())
        self.advantages = self.normal()
        self.values = self.normal()
        self.rewards = torch.zeros(B, T, dtype=torch.float64)
        last = T - 1 - self.mask.flip(1).argmax(1)
        self.rewards[torch.arange(B), last] = self.scores

    def flat(self, padded):
        return padded[self.inside]

    def data(self):
        mask = self.flat(self.mask).bool()
        return {
            "scores": self.scores, "group_id": self.group, "lengths": self.mask.sum(-1).long(), "cu_seqlens": self.cu,
            "response_mask": mask, "loss_mask": mask, "token_level_rewards": self.flat(self.rewards),
            "values": self.flat(self.values), "old_log_prob": self.flat(self.old),
            "log_prob": self.flat(self.log_prob), "advantages": self.flat(self.advantages),
        }  # fmt: skip


def same(batch, ours, padded, tol=1e-9):
    mask = batch.flat(batch.mask).bool()
    torch.testing.assert_close(ours[mask], batch.flat(padded)[mask], rtol=tol, atol=tol)


OUTCOME = {
    "grpo": (core.compute_grpo_outcome_advantage, {}, {}),
    "dr_grpo": (core.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}, {}),
    "rloo": (core.compute_rloo_outcome_advantage, {}, {}),
    "opo": (core.compute_opo_outcome_advantage, {}, {}),
    "gpg": (core.compute_gpg_outcome_advantage, {}, {}),
    "pass_at_k": (core.compute_grpo_passk_outcome_advantage, {"config": {"norm_adv_by_std_in_grpo": True}}, {}),
    "reinforce_plus_plus_baseline": (core.compute_reinforce_plus_plus_baseline_outcome_advantage, {}, {}),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", OUTCOME)
def test_outcome_estimators(name, seed):
    theirs, kwargs, options = OUTCOME[name]
    batch = Batch(seed)
    want, _ = theirs(batch.rewards, batch.mask, index=batch.group.numpy(), **kwargs)
    entry = get_advantage(name)
    data = batch.data()
    got = entry.call(data, options)[sequence_index(batch.cu, int(batch.cu[-1]))]
    if entry.whiten:
        got = whiten(got, data["response_mask"])
    # a group without spread is exactly 0 here; there rounding noise over epsilon
    same(batch, got, want, 1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_gae(seed):
    batch = Batch(seed, holes=True)
    want, returns = core.compute_gae_advantage_return(batch.rewards, batch.values, batch.mask, 0.97, 0.9)
    data = batch.data()
    got, ours = get_advantage("gae").call(data, {"gamma": 0.97, "gae_lambda": 0.9})
    same(batch, whiten(got, data["response_mask"]), want, 1e-6)
    same(batch, ours, returns)


@pytest.mark.parametrize("seed", [0, 1])
def test_reinforce_plus_plus_and_remax(seed):
    batch = Batch(seed)
    data = batch.data()
    want, returns = core.compute_reinforce_plus_plus_outcome_advantage(
        batch.rewards, batch.mask, config=type("C", (), {"gamma": 0.9})
    )
    got, ours = get_advantage("reinforce_plus_plus").call(data, {"gamma": 0.9})
    same(batch, whiten(got, data["response_mask"]), want, 1e-6)
    same(batch, ours, returns)
    greedy = torch.randn(B, dtype=torch.float64)
    want, returns = core.compute_remax_outcome_advantage(batch.rewards, greedy, batch.mask)
    got, ours = get_advantage("remax").call(data | {"greedy_scores": greedy})
    same(batch, got, want)
    same(batch, ours, returns)


@pytest.mark.parametrize("holes", [False, True])
def test_optimal_token_baseline(holes):
    batch = Batch(3, holes=holes)
    sum_sq, weight = torch.rand(B, T, dtype=torch.float64), torch.rand(B, T, dtype=torch.float64)
    theirs = (
        core.compute_multi_turn_optimal_token_baseline_advantage
        if holes
        else core.compute_optimal_token_baseline_advantage
    )
    want, returns = theirs(batch.rewards, batch.mask, batch.group.numpy(), batch.old, sum_sq, rollout_is_weights=weight)
    extra = {"sum_sq": batch.flat(sum_sq), "rollout_weight": batch.flat(weight)}
    got, ours = get_advantage("optimal_token_baseline").call(batch.data() | extra)
    same(batch, got, want)
    same(batch, ours, returns)


def actor_config(**policy_loss):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        policy_loss=PolicyLossConfig(**policy_loss),
    )


WIDE = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES = {
    "clip": ("vanilla", WIDE, "token-mean"),
    "gspo": ("gspo", WIDE, "seq-mean-token-mean"),
    "sapo": ("sapo", {}, "seq-mean-token-mean"),
    "gpg": ("gpg", {}, "token-mean"),
    "gmpo": ("geo_mean", WIDE, "seq-mean-token-mean"),
    "cispo": ("cispo", WIDE, "token-mean"),
    "dppo_tv": ("dppo_tv", {**WIDE, "cap": 3.0}, "token-mean"),
    "dppo_kl": ("dppo_kl", {**WIDE, "cap": 3.0}, "token-mean"),
    "dro": ("dro", {"beta": 0.5}, "token-mean"),
    "kl_cov": ("kl_cov", {"fraction": 0.1, "coef": 0.5}, "token-mean"),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name, seed):
    theirs, options, mode = LOSSES[name]
    batch = Batch(seed)
    if name in ("gspo", "gmpo"):
        batch.advantages = torch.randn(B, 1, dtype=torch.float64).expand(B, T).clone()
    weight = torch.rand(B, T, dtype=torch.float64) + 0.5
    a = batch.log_prob.clone().requires_grad_()
    config = actor_config(dro_beta=0.5, kl_cov_ratio=0.1, ppo_kl_coef=0.5)
    want, _ = core.get_policy_loss_fn(theirs)(
        batch.old, a, batch.advantages, batch.mask, loss_agg_mode=mode, config=config, rollout_is_weights=weight
    )
    want.backward()
    data = batch.data()
    entry = get_policy_loss(name)
    if entry.select is not None:
        data |= {"sample_id": torch.arange(B)}
        data["selection"] = entry.make_selection(data, options)
    x = data["log_prob"].clone().requires_grad_()
    token_weight = batch.flat(weight)
    in_loss = "rollout_weight" in entry.data
    result = entry.call(data | {"log_prob": x, "rollout_weight": token_weight if in_loss else None}, options)
    loss = result.loss if in_loss else result.loss * token_weight
    got = aggregate(loss, data["loss_mask"], loss_agg_mode=mode, cu_seqlens=batch.cu)
    got.backward()
    torch.testing.assert_close(got, want.detach(), rtol=1e-6, atol=1e-8)
    same(batch, x.grad, a.grad, 1e-7)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregation(mode):
    batch = Batch(0)
    loss = batch.normal()
    want = core.agg_loss(loss, batch.mask, mode, loss_scale_factor=float(T) if mode.endswith("norm") else None)
    mask = batch.flat(batch.mask).bool()
    scale = aggregation_scale(mode, batch.mask.sum(-1).long(), loss_scale_factor=float(T), dtype=torch.float64)
    torch.testing.assert_close(aggregate(batch.flat(loss), mask, scale=scale, cu_seqlens=batch.cu), want)


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+", "abs+"])
def test_kl(kind):
    batch = Batch(1)
    a, x = (batch.log_prob.clone().requires_grad_() for _ in range(2))
    want = core.kl_penalty(a, batch.old, kind)
    got = get_kl(kind).call({"log_prob": x, "ref_log_prob": batch.old})
    torch.testing.assert_close(got, want)
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(x.grad, a.grad)


def test_adaptive_kl():
    theirs = core.AdaptiveKLController(0.1, 0.05, 1000)
    ours = AdaptiveKL(0.1, target=0.05, horizon=1000)
    for kl, n in ((0.04, 32), (0.3, 64), (0.05, 16), (0.0, 128)):
        theirs.update(kl, n)
        assert ours.update(kl, n) == pytest.approx(theirs.value)


def test_value_loss():
    batch = Batch(2)
    old, returns = batch.values, batch.normal()
    new = old + batch.normal()
    want, clipped = core.compute_value_loss(new, returns, old, batch.mask, 0.5, loss_agg_mode="token-mean")
    got = value_loss(batch.flat(new), batch.flat(old), batch.flat(returns), value_clip=0.5)
    mask = batch.flat(batch.mask).bool()
    torch.testing.assert_close(aggregate(got.loss, mask, cu_seqlens=batch.cu), want)
    assert float(got.stats["clip"][mask].mean()) == pytest.approx(float(clipped))


@pytest.mark.parametrize("statistic", ["token_k2", "token_k3", "seq_sum_k2", "seq_mean_k3", "seq_max_k3"])
def test_rejection(statistic):
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    from fastrl.algorithms import get_correction

    batch = Batch(4)
    level, _, kind = statistic.rpartition("_")
    want, _ = helper.compute_rollout_rejection_mask(batch.log_prob - batch.old, batch.mask, statistic, "0.05")
    data = batch.data() | {"old_log_prob": batch.flat(batch.log_prob), "rollout_log_prob": batch.flat(batch.old)}
    rule = {"statistic": kind, "level": level, "upper": 0.05}
    got = get_correction("none").call(data, {"rejection": [rule]}).keep
    assert np.array_equal(got.numpy(), batch.flat(want).bool().numpy()) and 0 < int(got.sum()) < got.numel()
