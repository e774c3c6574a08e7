"""Terms that need more of a row than its log-prob, on two ranks as on one: the router's balance and the full KL."""

import json
import sys
from pathlib import Path

import pytest
import torch
from test_families import SIZES
from tiny_folder import short_run, write_tokenizer
from tiny_models import ragged_batch
from transformers import MixtralConfig, MixtralForCausalLM

from fastrl.algorithms.registry import get_policy_loss
from fastrl.config.load import load_config
from fastrl.data.packing import fill_up, pack
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.dist.collectives import all_reduce_max
from fastrl.dist.fsdp import shard_model
from fastrl.models.load import load_model
from fastrl.run import run_training
from fastrl.trainer.actor import Actor
from fastrl.trainer.losses import LossSettings
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import optimizer_batch, remaining
from fastrl.trainer.optim import Optimizer, Schedule
from fastrl.trainer.router_loss import RouterLoss

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "trainer")]
from launched import launch_body
from test_rank_invariance import flat

VOLATILE = ("time", "memory/", "perf/")
SETTINGS = [
    "run.dtype=float64",
    "optim.total_steps=2",
    "algorithm.num_updates_per_step=2",
    "algorithm.router_aux_coef=0.3",
    "rollout.num_prompts_per_step=3",
    "rollout.stop_token_ids=[5,9,17,23,31]",
    "run.max_tokens_per_microbatch=64",
]
FULL_KL = [
    "algorithm.kl_loss_coef=0.2",
    "algorithm.kl_loss_kind=full",
    "algorithm.kl_reward_coef=0.1",
    "algorithm.kl_reward_kind=full",
    "parallel.shard=1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    sizes = SIZES | {"eos_token_id": 2, "pad_token_id": 0}
    experts = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    experts.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def run(model, folder, *overrides):
    path = run_training(load_config([], short_run(model, folder, *SETTINGS, *overrides)))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows], flat(load_checkpoint(path)[0])


def test_two_ranks_as_one(model, tmp_path):
    settings = FULL_KL
    rows, weights = run(model, tmp_path / "1", *settings)
    other_rows, other_weights = run(model, tmp_path / "2", *settings, "parallel.processes=2")
    assert len(rows) == len(other_rows) == 2
    assert all(row["policy/router_loss"] > 0 for row in rows)
    assert all(row["kl/reference"] > 0 for row in rows[1:])
    for one, two in zip(rows, other_rows):
        assert two == pytest.approx(one, rel=1e-9, abs=1e-11)
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert (other_weights[name] - tensor).norm() <= 1e-9 * (1 + tensor.norm()), name


def actor_of(folder, mesh=None):
    """A policy whose loss has nothing but the router's term, whole or sharded."""
    model = shard_model(load_model(folder, dtype=torch.float64), mesh, dtype=torch.float64)
    actor = Actor(
        model, Optimizer(model, Schedule(0.0), name="policy"), LossSettings(get_policy_loss("clip"), {}),
        temperature=1.0, dtype=torch.float64, gradient_in_forward=True,
    )  # fmt: skip
    actor.router = RouterLoss(actor, 0.3)
    return actor


def router_update(actor, own):
    """(loss of the sequences `own`, gradient) of one optimizer batch of five sequences."""
    batch = ragged_batch([4, 3], [[3, 5, 0], [2, 4]], seed=3)
    mask = batch.response_mask.clone()
    mask[1] = False
    zeros = torch.zeros(14, dtype=torch.float64)
    batch = batch.with_(old_log_prob=zeros, advantages=zeros, loss_mask=mask).select(torch.tensor(own))
    members = optimizer_batch(
        batch, torch.arange(len(own)), batch.loss_mask, loss_agg_mode="token-mean", loss_scale_factor=None
    )
    packed = pack(batch, max_tokens=12)
    (count,) = all_reduce_max([len(packed)])
    passes = remaining(fill_up(packed, count, "cpu"), batch.loss_mask)
    actor.router.count(passes)
    seen = torch.zeros(batch.num_tokens, dtype=torch.float64)
    loss = sum(float(actor.backward(members, micro, seen, Metrics())) for micro in passes)
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in actor.model.parameters()]
    return loss, torch.cat([g.flatten() for g in whole])


SHARDED = """
from fastrl.dist.mesh import make_mesh
from test_row_terms_ranks import actor_of, router_update
loss, gradient = router_update(actor_of("{model}", make_mesh(torch.device("cpu"), 1, None)), [1, 2, 3] if rank else [0, 4])
expected = torch.load("{file}", weights_only=True)
return [loss, float((gradient - expected).norm() / expected.norm())]
"""


def test_the_router_s_term_of_sharded_ranks(model, tmp_path):
    loss, gradient = router_update(actor_of(model), [0, 1, 2, 3, 4])
    torch.save(gradient, tmp_path / "gradient.pt")
    assert loss > 0 and gradient.norm() > 0
    (first, error), (second, other) = launch_body(SHARDED.format(model=model, file=tmp_path / "gradient.pt"), 2)
    assert first + second == pytest.approx(loss, rel=1e-9) and first > 0 and second > 0
    assert error <= 1e-9 and other <= 1e-9
