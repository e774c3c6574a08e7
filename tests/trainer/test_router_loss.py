"""The load-balancing loss: against the model's own function over the rows that count, and the same for every split."""

import pytest
import torch
from test_families import EXPERTS, SIZES
from tiny_folder import short_run, write_tiny_folder
from tiny_models import ragged_batch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fastrl.algorithms.registry import get_policy_loss
from fastrl.config.load import load_config
from fastrl.data.packing import pack
from fastrl.errors import ModelError
from fastrl.models.attention import IMPLEMENTATION
from fastrl.trainer.actor import Actor
from fastrl.trainer.losses import LossSettings
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import keep_rows, optimizer_batch
from fastrl.trainer.optim import Optimizer, Schedule
from fastrl.trainer.router_loss import RouterLoss
from fastrl.trainer.setup import build

COEF = 0.7
FAMILIES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
}


def model_of(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def batch_of_two_prompts():
    batch = ragged_batch([4, 3], [[3, 5, 0], [2, 4]], seed=3)
    mask = batch.response_mask.clone()
    mask[1] = False
    # advantages of 0: nothing but the router's term has a gradient
    return batch.with_(old_log_prob=torch.zeros(14), advantages=torch.zeros(14), loss_mask=mask)


def written_out(model, batch):
    """The model's own balancing loss over the rows that predict tokens of the loss, each sequence by itself."""
    layers = None
    model.set_attn_implementation("eager")
    for s in range(batch.num_sequences):
        g = int(batch.group_index[s])
        prompt = batch.prompt_ids[batch.prompt_cu_seqlens[g] : batch.prompt_cu_seqlens[g + 1]]
        span = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        if span.start == span.stop:
            continue
        ids = torch.cat([prompt, batch.response_ids[span]])[None]
        output = model.model(ids, use_cache=False, output_router_logits=True)
        kept = batch.loss_mask[span]
        rows = [layer.reshape(-1, 4)[len(prompt) - 1 : -1][kept] for layer in output.router_logits]
        layers = [[r] for r in rows] if layers is None else [[*seen, r] for seen, r in zip(layers, rows)]
    model.set_attn_implementation(IMPLEMENTATION)
    return load_balancing_loss_func(tuple(torch.cat(layer) for layer in layers), 4, 2)


def gradient(model):
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


SPLITS = [(1000, True), (1000, False), (14, True), (9, False)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_split_gives_the_model_s_own_loss(family):
    model, batch = model_of(family), batch_of_two_prompts()
    members = optimizer_batch(
        batch, torch.arange(5), batch.loss_mask, loss_agg_mode="token-mean", loss_scale_factor=None
    )
    settings = LossSettings(get_policy_loss("clip"), {})
    actor = Actor(
        model, Optimizer(model, Schedule(0.0), name="policy"), settings, temperature=1.0, dtype=torch.float32,
        gradient_in_forward=True,
    )  # fmt: skip
    actor.router = RouterLoss(actor, COEF)
    want = COEF * written_out(model, batch)
    want.backward()
    want_gradient = gradient(model)
    seen = torch.zeros(14)
    for max_tokens, share in SPLITS:
        kept = [keep_rows(m, batch.loss_mask) for m in pack(batch, max_tokens=max_tokens, share_prompts=share)]
        kept = [m for m in kept if m is not None]
        actor.router.count(kept)
        metrics = Metrics()
        total = sum(float(actor.backward(members, m, seen, metrics)) for m in kept)
        assert total == pytest.approx(float(want.detach()), rel=1e-5)
        assert metrics.reduce()["policy/router_loss"] == pytest.approx(float(want.detach()) / COEF, rel=1e-5)
        got = gradient(model)
        assert (got - want_gradient).norm() < 1e-4 * want_gradient.norm()


def test_a_model_without_experts_is_refused(tmp_path):
    overrides = short_run(write_tiny_folder(tmp_path / "model"), tmp_path, "algorithm.router_aux_coef=0.01")
    with pytest.raises(ModelError, match=r"algorithm\.router_aux_coef is set, but llama has no experts"):
        build(load_config([], overrides).config)
