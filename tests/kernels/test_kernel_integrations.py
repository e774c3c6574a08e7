"""The adapters against the real trainers' own functions, where those are installed: equal numbers and gradients."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import TRITON

pytestmark = pytest.mark.skipif(TRITON, reason="the functions below the adapters are tested there")

B, T = 7, 23
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def tensors(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, generator=generator) for _ in range(count)]


def a_mask(seed=0, holes=True):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([23, 1, 12, 23, 5, 17, 2])
    mask = torch.arange(T)[None] < lengths[:, None]
    if holes:
        mask &= (torch.rand(B, T, generator=generator) < 0.8) | (torch.arange(T)[None] == 0)
    return mask.float()


def same(got, want, mask=None):
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    if mask is not None:
        got, want = got[mask.bool()], want[mask.bool()]
    torch.testing.assert_close(got, want.to(got.dtype), rtol=2e-5, atol=2e-5)


class ActorConfig:
    """What verl's loss reads of its configuration."""

    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, None, 0.28

    def __init__(self, **counts):
        self.global_batch_info = counts

    def get(self, name, default):
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl():
    pytest.importorskip("verl", reason="verl is not installed")
    return importlib.import_module("verl.trainer.ppo.core_algos")


def test_verl_advantages(verl):
    from fastrl.kernels.integrations import verl as mine

    rewards, values = tensors(1, 2)
    mask = a_mask()
    for gamma, lam in ((1.0, 1.0), (0.98, 0.9)):
        got = mine.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        want = verl.compute_gae_advantage_return(rewards, values, mask, torch.tensor(gamma), torch.tensor(lam))
        same(got[0], want[0], mask)
        same(got[1], want[1], mask)
    index = np.array(["b", "a", "b", "a", "b", "lonely", "a"], dtype=object)
    rewards = (rewards > 0).float() * mask
    for normalise in (True, False):
        got = mine.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=normalise)
        want = verl.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=normalise)
        same(got[0], want[0])
    same(
        mine.compute_rloo_outcome_advantage(rewards, mask, index)[0],
        verl.compute_rloo_outcome_advantage(rewards, mask, index)[0],
    )


@pytest.mark.parametrize("mode", MODES)
def test_verl_losses(verl, mode):
    from fastrl.kernels.integrations import verl as mine

    lp, old, adv, weights = tensors(2, 4)
    mask = a_mask()
    mask[3] = 0
    counts = {"dp_size": 2, "batch_num_tokens": 300, "global_batch_size": 20}
    for config in (ActorConfig(), ActorConfig(**counts)):
        results = []
        for module in (mine, verl):
            x = lp.clone().requires_grad_()
            loss, metrics = module.compute_policy_loss_vanilla(
                old, x, adv, mask, mode, config, rollout_is_weights=weights.abs()
            )
            loss.backward()
            results.append((loss.detach(), x.grad, metrics))
        same(results[0][0], results[1][0])
        same(results[0][1], results[1][1])
        for name, value in results[1][2].items():
            assert abs(results[0][2][name] - value) < 1e-5, name
        options = config.global_batch_info
        results = []
        for module in (mine, verl):
            x = lp.clone().requires_grad_()
            loss, fraction = module.compute_value_loss(x, adv, old, mask, 0.3, mode, **options)
            loss.backward()
            results.append((loss.detach(), x.grad, fraction))
        for got, want in zip(*results, strict=True):
            same(got, want)
        same(mine.agg_loss(lp, mask, mode, **options), verl.agg_loss(lp, mask, mode, **options))


def test_verl_kl_and_log_probs(verl):
    from fastrl.kernels.integrations import verl as mine

    functional = importlib.import_module("verl.utils.torch_functional")
    lp, ref = tensors(3, 2)
    for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+", "abs+"):
        results = []
        for module in (mine, verl):
            x = lp.clone().requires_grad_()
            value = module.kl_penalty(x, ref, kind)
            value.sum().backward()
            results.append((value.detach(), x.grad))
        same(results[0][0], results[1][0])
        same(results[0][1], results[1][1])
    logits, labels = torch.randn(B, T, 41), torch.randint(0, 41, (B, T))
    same(mine.logprobs_from_logits(logits, labels), functional.logprobs_from_logits(logits, labels))


def test_verl_install_and_restore(verl):
    from fastrl.kernels.integrations import verl as mine

    before = verl.compute_gae_advantage_return
    restore = mine.install()
    try:
        assert verl.compute_gae_advantage_return is mine.compute_gae_advantage_return
        assert verl.get_adv_estimator_fn("gae") is mine.compute_gae_advantage_return
        assert verl.get_policy_loss_fn("vanilla") is mine.compute_policy_loss_vanilla
    finally:
        restore()
    assert verl.compute_gae_advantage_return is verl.get_adv_estimator_fn("gae") is before


def test_trl():
    pytest.importorskip("trl", reason="TRL is not installed")
    from fastrl.kernels.integrations import trl as mine

    utils = importlib.import_module("trl.trainer.utils")
    logits = torch.randn(B, T, 41)
    index, several = torch.randint(0, 41, (B, T)), torch.randint(0, 41, (B, T, 3))
    for temperature in (1.0, 0.7):
        same(
            mine.selective_log_softmax(logits, index, temperature, a_mask()),
            utils.selective_log_softmax(logits, index, temperature, a_mask()),
        )
        same(
            mine.selective_log_softmax(logits, several, temperature),
            utils.selective_log_softmax(logits, several, temperature),
        )
        results = []
        for module in (mine, utils):
            x = logits.clone().requires_grad_()
            values = module.selective_log_softmax_and_entropy(x, index, temperature=temperature)
            (values[0] - 2 * values[1]).sum().backward()
            results.append((*(v.detach() for v in values), x.grad))
        for got, want in zip(*results, strict=True):
            same(got, want)
    same(mine.entropy_from_logits(logits), utils.entropy_from_logits(logits))
    rewards = torch.tensor([0.0, 1, 1, float("nan"), 0.5, 0.5, 0.5, 0.25])
    grouped = rewards.view(-1, 4)
    mean = torch.nanmean(grouped, 1).repeat_interleave(4)
    std = utils.nanstd(grouped, dim=1).repeat_interleave(4)
    want = ((rewards - mean) / (std + 1e-4)).nan_to_num(0.0)
    torch.testing.assert_close(mine.group_advantages(rewards, 4), want, rtol=1e-5, atol=1e-5)
    restore, before = mine.install(), utils.selective_log_softmax
    assert before is mine.selective_log_softmax
    restore()
    assert utils.selective_log_softmax is not mine.selective_log_softmax


@pytest.fixture(scope="module")
def openrlhf():
    """openrlhf.models.{utils, loss} from the installed package; its other dependencies are not needed for those two."""
    found = importlib.util.find_spec("openrlhf")
    if found is None or not found.submodule_search_locations:
        pytest.skip("openrlhf is not installed")
    folder = Path(found.submodule_search_locations[0]) / "models"
    if importlib.util.find_spec("deepspeed") is None:
        sys.modules.setdefault("deepspeed", types.ModuleType("deepspeed"))
    package = types.ModuleType("real_openrlhf_models")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    yield types.SimpleNamespace(
        utils=importlib.import_module("real_openrlhf_models.utils"),
        loss=importlib.import_module("real_openrlhf_models.loss"),
    )
    for name in [n for n in sys.modules if n.startswith("real_openrlhf_models")]:
        del sys.modules[name]


def test_openrlhf(openrlhf):
    from fastrl.kernels.integrations import openrlhf as mine

    lp, old, adv = tensors(4, 3)
    mask = a_mask()
    for token_level, dual in ((True, None), (False, 3.0)):
        results = []
        for module in (mine, openrlhf.loss):
            x = lp.clone().requires_grad_()
            loss, clip, kl, *_ = module.PolicyLoss(0.2, 0.3, dual, token_level)(x, old, adv, mask)
            loss.backward()
            results.append((loss.detach(), clip, kl, x.grad))
        for got, want in zip(*results, strict=True):
            same(got, want)
        counts = {"dp_size": 4, "batch_num_tokens": 500.0, "global_batch_size": 30.0}
        for clip_eps in (None, 0.3):
            value = mine.ValueLoss(clip_eps, token_level)(lp, old, adv, mask, **counts)
            same(value, openrlhf.loss.ValueLoss(clip_eps, token_level)(lp, old, adv, mask, **counts))
    for kind in ("k1", "k2", "k3"):
        same(
            mine.compute_approx_kl(lp, old, kl_estimator=kind),
            openrlhf.utils.compute_approx_kl(lp, old, kl_estimator=kind),
        )
    logits, labels = torch.randn(B, T, 41), torch.randint(0, 41, (B, T))
    got = mine.log_probs_from_logits(logits, labels, 0.7)
    same(got, openrlhf.utils.log_probs_from_logits(logits.clone(), labels, 0.7))


def test_openrlhf_advantages_by_its_rule():
    # its experience maker cannot be imported without Ray; the rule: masked tokens are steps with reward and value 0
    from fastrl.kernels.integrations.openrlhf import get_advantages_and_returns

    mask = torch.tensor([[1.0, 1, 0, 1], [1, 1, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 5, 1], [0, 0, 1, 7]])
    values = torch.tensor([[0.5, 0.25, 9, 0.5], [0.1, 0.2, 0.3, float("nan")]])
    advantages, returns = get_advantages_and_returns(values, rewards, mask, 0.9, 0.8)
    # row 0 from the end: 1 - .5 = .5;  0 + .9 * .5 + .72 * .5 = .81;  0 + .9 * 0 - .25 + .72 * .81;  ...
    torch.testing.assert_close(advantages[0, 3], torch.tensor(0.5))
    torch.testing.assert_close(advantages[0, 1], torch.tensor(-0.25 + 0.72 * 0.81))
    torch.testing.assert_close(returns[1, :3] - torch.tensor([0.1, 0.2, 0.3]), advantages[1, :3])
    assert advantages.isfinite().all()


def test_what_the_adapters_do_not_do_is_refused():
    from fastrl.kernels.integrations import openrlhf, trl, verl

    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="policy_loss_type = 'gspo': only ppo"):
        openrlhf.PolicyLoss(policy_loss_type="gspo")
    with pytest.raises(ValueError, match="unbiased_gradient = True"):
        openrlhf.compute_approx_kl(x, x, unbiased_gradient=True)
    with pytest.raises(ValueError, match="scale_rewards = 'batch'"):
        trl.group_advantages(torch.zeros(4), 2, "batch")
    with pytest.raises(ValueError, match="global_batch_size = None"):
        verl.agg_loss(x, x, "seq-mean-token-mean", dp_size=2)
    with pytest.raises(ValueError, match="config = None"):
        verl.compute_policy_loss_vanilla(x, x, x, x)
