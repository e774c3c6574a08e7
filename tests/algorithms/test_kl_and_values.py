"""KL estimators, controllers and the value loss."""

import algorithm_oracles as oracle
import numpy as np
import pytest
import ragged_data
import torch

from fastrl.algorithms import get_kl, list_kls
from fastrl.algorithms.distillation import forward_kl, teacher_advantage, top_k_forward_kl
from fastrl.algorithms.kl import AdaptiveKL, FixedKL, full_kl, unbiased_kl
from fastrl.algorithms.token_rewards import kl_in_reward, move_to_sampled, place_scores
from fastrl.algorithms.value_loss import value_loss

KINDS = sorted(set(list_kls()) - {"full"})


@pytest.mark.parametrize("kind", KINDS)
def test_kl_values_and_gradients(kind):
    x = torch.tensor([0.5, -0.5, 0.01, 2.0, -2.0, 30.0, -30.0, -3.0], dtype=torch.float64)
    log_prob = (x - 4.0).requires_grad_()
    got = get_kl(kind).call({"log_prob": log_prob, "ref_log_prob": torch.full_like(x, -4.0)})
    got.sum().backward()
    want = [oracle.kl(float(v), kind) for v in x]
    np.testing.assert_allclose(got.detach().numpy(), [w[0] for w in want], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(log_prob.grad.numpy(), [w[1] for w in want], rtol=1e-9, atol=1e-12)


def test_unbiased_kl_multiplies_by_the_ratio_with_its_gradient():
    log_prob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old, ref = torch.tensor([[-1.5, -2.0], [-1.2, -2.5]], dtype=torch.float64)
    got = unbiased_kl(get_kl("k1").call({"log_prob": log_prob, "ref_log_prob": ref}), log_prob, old)
    x = np.array([0.2, 0.5])
    rho = np.exp([0.5, 0.0])
    np.testing.assert_allclose(got.detach().numpy(), x * rho)
    got.sum().backward()
    np.testing.assert_allclose(log_prob.grad.numpy(), rho + x * rho)


def test_full_kl_and_its_gradient():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(4, 7, generator=g, dtype=torch.float64).requires_grad_()
    w = torch.randn(4, 7, generator=g, dtype=torch.float64)
    p = torch.distributions.Categorical(logits=z / 0.7)
    q = torch.distributions.Categorical(logits=w / 0.7)
    torch.testing.assert_close(full_kl(z, w, temperature=0.7), torch.distributions.kl_divergence(p, q))
    assert torch.autograd.gradcheck(lambda a: full_kl(a, w, temperature=0.7), z)
    masked = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert torch.isfinite(full_kl(masked, torch.zeros(1, 3))).all()


def test_adaptive_controller_by_hand():
    controller = AdaptiveKL(0.1, target=0.05, horizon=100)
    assert controller.value == 0.1
    assert controller.update(0.055, 10) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(9.0, 10) == pytest.approx(0.101 * (1 + 0.2 * 0.1))  # error clipped at 0.2
    assert controller.update(0.0, 10) == pytest.approx(0.101 * 1.02 * (1 - 0.2 * 0.1))
    before = controller.value
    assert controller.update(float("nan"), 10) == before
    other = AdaptiveKL(5.0, target=0.05, horizon=100)
    other.load_state_dict(controller.state_dict())
    assert other.value == before
    fixed = FixedKL(0.3)
    assert fixed.update(100.0, 10) == 0.3
    for make in (lambda: FixedKL(-0.1), lambda: AdaptiveKL(0.1, target=0.0), lambda: FixedKL(float("nan"))):
        with pytest.raises(ValueError):
            make()


def test_place_scores_on_the_last_sampled_token():
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 0]).bool()
    got = place_scores(torch.tensor([1.5, -2.0, 0.25, 9.0]), mask, torch.tensor([0, 3, 5, 5, 7]))
    assert got.tolist() == [0, 1.5, 0, -2.0, 0, 0, 0]


def test_rewards_on_unsampled_tokens_move_back():
    mask = torch.tensor([1, 0, 0, 0, 1, 1]).bool()
    rewards, moved, lost = move_to_sampled(
        torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), mask, torch.tensor([0, 3, 6])
    )
    assert rewards.tolist() == [7.0, 0, 0, 0, 16.0, 32.0]  # the 8 has no sampled token before it in its response
    assert (int(moved), int(lost)) == (2, 1)


def test_kl_in_reward_is_taken_from_sampled_tokens_only():
    scores = torch.tensor([0.0, 0.0, 1.0])
    got = kl_in_reward(scores, torch.tensor([0.2, torch.nan, 0.3]), torch.tensor([True, False, True]), beta=0.1)
    assert got.tolist() == pytest.approx([-0.02, 0.0, 0.97])


@pytest.mark.parametrize("huber_delta", [None, 0.3])
@pytest.mark.parametrize("value_clip", [0.5, None])
def test_value_loss(value_clip, huber_delta):
    d = ragged_data.batch(0)
    old, returns = d["values"], d["token_level_rewards"]
    values = (old + torch.linspace(-1.03, 0.97, old.numel()).double()).requires_grad_()

    def h(x):
        x = np.abs(x)
        return (
            x * x / 2
            if huber_delta is None
            else np.where(x <= huber_delta, x * x / 2, huber_delta * (x - huber_delta / 2))
        )

    def want(v):
        o, r = old.numpy(), returns.numpy()
        near = v if value_clip is None else np.clip(v, o - value_clip, o + value_clip)
        return np.maximum(h(v - r), h(near - r))

    got = value_loss(values, old, returns, value_clip=value_clip, huber_delta=huber_delta)
    v = values.detach().numpy()
    np.testing.assert_allclose(got.loss.detach().numpy(), want(v), rtol=1e-12)
    got.loss.sum().backward()
    np.testing.assert_allclose(values.grad.numpy(), (want(v + 1e-6) - want(v - 1e-6)) / 2e-6, rtol=1e-5, atol=1e-6)
    if value_clip is None:
        assert got.stats["clip"].sum() == 0


def test_distillation():
    g = torch.Generator().manual_seed(1)
    z, w = (torch.randn(3, 9, generator=g, dtype=torch.float64) for _ in range(2))
    p, q = torch.distributions.Categorical(logits=z), torch.distributions.Categorical(logits=w)
    torch.testing.assert_close(forward_kl(z, w), torch.distributions.kl_divergence(q, p))
    log_q = torch.log_softmax(w, -1)
    top, ids = log_q.topk(9, -1)
    torch.testing.assert_close(top_k_forward_kl(z, ids, top), forward_kl(z, w))
    top, ids = log_q.topk(3, -1)
    short = top_k_forward_kl(z, ids, top)
    rest_q, rest_p = 1 - top.exp().sum(-1), 1 - torch.log_softmax(z, -1).gather(-1, ids).exp().sum(-1)
    part = (top.exp() * (top - torch.log_softmax(z, -1).gather(-1, ids))).sum(-1)
    torch.testing.assert_close(short, part + rest_q * (rest_q / rest_p).log())
    torch.testing.assert_close(top_k_forward_kl(z, ids, top, tail=False), part)
    assert (short >= 0).all() and (short <= forward_kl(z, w) + 1e-12).all()
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    signal = teacher_advantage(x, torch.tensor([-0.5, -3.0]), torch.tensor([1.0, 1.0]), weight=2.0)
    assert signal.tolist() == [2.0, -1.0] and not signal.requires_grad
