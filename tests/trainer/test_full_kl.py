"""The KL over the vocabulary in the loop: against softmaxes written out over a plain forward of each sequence."""

import pytest
import torch
from tiny_models import ragged_batch, tiny_model

from fastrl.algorithms.registry import get_kl, get_policy_loss
from fastrl.data.packing import pack
from fastrl.models.attention import IMPLEMENTATION
from fastrl.models.double import keep_double
from fastrl.trainer import full_kl
from fastrl.trainer.actor import Actor, PolicyModel
from fastrl.trainer.full_kl import FullKL
from fastrl.trainer.losses import LossSettings
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import optimizer_batch
from fastrl.trainer.optim import Optimizer, Schedule

TEMPERATURE, COEF = 0.8, 0.3


def models(name="gemma2"):
    policy, reference = tiny_model(name, seed=0), tiny_model(name, seed=1)
    for model in (policy, reference):
        model.set_attn_implementation(IMPLEMENTATION)
    return policy, reference


def batch_of_two_prompts():
    batch = ragged_batch([4, 3], [[3, 5, 0], [2, 4]], seed=3)
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return batch.with_(old_log_prob=noise - 3, advantages=noise.flip(0), loss_mask=batch.response_mask)


def written_out(policy, reference, batch):
    """KL [T] with gradient, from the model's own logits of each prompt and response."""
    plain = [m.config._attn_implementation for m in (policy, reference)]
    rows = []
    for s in range(batch.num_sequences):
        g = int(batch.group_index[s])
        prompt = batch.prompt_ids[batch.prompt_cu_seqlens[g] : batch.prompt_cu_seqlens[g + 1]]
        response = batch.response_ids[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]]
        if not len(response):
            continue
        ids, log_p = torch.cat([prompt, response])[None], []
        for model, implementation in zip((policy, reference), plain):
            model.set_attn_implementation("eager")
            with keep_double(model):
                logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            model.set_attn_implementation(implementation)
            log_p.append(logits - logits.exp().sum(-1, keepdim=True).log())
        rows.append((log_p[0].exp() * (log_p[0] - log_p[1].detach())).sum(-1))
    return torch.cat(rows)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(full_kl, "CHUNK_ELEMENTS", 61 * 3)


def gradient(policy):
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    policy.zero_grad()
    return flat


def test_values_of_a_batch():
    policy, reference = models()
    batch = batch_of_two_prompts()
    both = [PolicyModel(m, temperature=TEMPERATURE, dtype=torch.float64) for m in (policy, reference)]
    got = FullKL(*both).of_batch(pack(batch, max_tokens=16), batch.old_log_prob)
    torch.testing.assert_close(got, written_out(policy, reference, batch).detach(), rtol=1e-10, atol=1e-12)
    assert (got > 0.01).all()


@pytest.mark.parametrize("max_tokens", [1000, 12])
@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_gradient_of_the_update(loss, max_tokens):
    policy, reference = models()
    batch = batch_of_two_prompts()
    members = optimizer_batch(
        batch, torch.arange(5), batch.loss_mask, loss_agg_mode="seq-mean-token-mean", loss_scale_factor=None
    )
    entry = get_policy_loss(loss)

    def update(with_kl):
        settings = LossSettings(entry, {}, kl=get_kl("full") if with_kl else None, kl_coef=COEF)
        optimizer = Optimizer(policy, Schedule(0.0), name="policy")
        in_forward = entry.level != "sequence"
        actor = Actor(
            policy, optimizer, settings, temperature=TEMPERATURE, dtype=torch.float64, gradient_in_forward=in_forward
        )
        if with_kl:
            actor.full_kl = FullKL(actor, PolicyModel(reference, temperature=TEMPERATURE, dtype=torch.float64)).rows
        seen = torch.zeros(batch.num_tokens, dtype=torch.float64)
        micro_batches = pack(batch, max_tokens=max_tokens)
        return sum(float(actor.backward(members, micro, seen, Metrics())) for micro in micro_batches)

    plain, plain_gradient = update(False), gradient(policy)
    term = COEF * (written_out(policy, reference, batch) * members.scale).sum()
    term.backward()
    term_gradient = gradient(policy)
    both, both_gradient = update(True), gradient(policy)
    assert both == pytest.approx(plain + float(term.detach()), rel=1e-9)
    assert (both_gradient - plain_gradient - term_gradient).norm() < 1e-9 * term_gradient.norm()
    assert all(p.grad is None for p in reference.parameters())
