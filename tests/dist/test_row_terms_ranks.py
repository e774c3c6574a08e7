"""Terms that need more of a row than its log-prob, on two ranks as on one: the router's balance and the full KL."""

import json
import sys
from pathlib import Path

import pytest
import torch
from test_families import SIZES
from tiny_folder import short_run, write_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.run import run_training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
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


@pytest.mark.parametrize("settings", [FULL_KL, []], ids=["full_kl", "sharded"])
def test_two_ranks_as_one(model, tmp_path, settings):
    rows, weights = run(model, tmp_path / "1", *settings)
    other_rows, other_weights = run(model, tmp_path / "2", *settings, "parallel.processes=2")
    assert len(rows) == len(other_rows) == 2
    assert all(row["policy/router_loss"] > 0 for row in rows)
    assert not settings or all(row["kl/loss"] > 0 for row in rows[1:]), rows[1].keys()
    for one, two in zip(rows, other_rows):
        assert two == pytest.approx(one, rel=1e-9, abs=1e-11)
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert (other_weights[name] - tensor).norm() <= 1e-9 * (1 + tensor.norm()), name
