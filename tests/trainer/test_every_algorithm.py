"""Two steps of every registered estimator, loss and correction, end to end, with known metrics and finite numbers."""

import math

import pytest
import torch
from tiny_folder import short_run, write_tiny_folder

from fastrl.algorithms.registry import list_advantages, list_corrections, list_policy_losses
from fastrl.config.load import load_config
from fastrl.trainer.loop import Trainer
from fastrl.trainer.metric_names import unknown_metrics
from fastrl.trainer.reporter import Silent
from fastrl.trainer.setup import build

LOSS_OPTIONS = {"dro": "{beta: 0.1}", "kimi": "{beta: 0.1}"}
ADVANTAGE_OPTIONS = {"gdpo": "{weights: {parity: 1.0}}", "reinforce": "{baseline_decay: 0.9}"}
OTHERS = [
    ["algorithm.entropy_quantile=0.5"],
    ["algorithm.entropy_coef=0.01", "algorithm.entropy_target=2.0"],
    ["algorithm.kl_loss_coef=0.1", "algorithm.kl_unbiased=true"],
    ["algorithm.kl_reward_coef=0.1", "algorithm.kl_controller=adaptive"],
    ["algorithm.kl_loss_coef=0.1", "algorithm.kl_loss_kind=full"],
    ["algorithm.kl_reward_coef=0.1", "algorithm.kl_reward_kind=full", "algorithm.policy_loss=gspo"],
    ["algorithm.dynamic_sampling=true"],
    ["algorithm.policy_loss=decoupled", "algorithm.policy_loss_options={proximal: loglinear}"],
    ["algorithm.advantage=gae", "algorithm.pf_ppo_mode=pow"],
    ["algorithm.advantage=gae", "algorithm.advantage_options={bootstrap_truncated: true}"],
    ["reward.overlong_buffer_tokens=4"],
    ["rollout.temperature=0.7"],
    ["run.dtype=float64"],
    ["run.dtype=bfloat16"],
    ["model.gradient_checkpointing=true"],
    ["run.share_prompts=false"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def two_steps(model, tmp_path, *overrides):
    """Metrics of the second of two steps."""
    parts = build(load_config([], short_run(model, tmp_path, *overrides)).config)
    trainer = Trainer(parts, Silent(), None, lambda score: None)
    try:
        trainer.step()
        values = trainer.step()[1]
    finally:
        parts.generator.rewards.close()
    assert unknown_metrics(values) == []
    assert all(math.isfinite(value) for value in values.values())
    assert values["optim/updates"] >= 1 and values["optim/skipped_updates"] == 0
    return values


@pytest.mark.parametrize("name", list_policy_losses())
def test_losses(model, tmp_path, name):
    options = LOSS_OPTIONS.get(name, "{}")
    overrides = [f"algorithm.policy_loss={name}", f"algorithm.policy_loss_options={options}"]
    values = two_steps(model, tmp_path, *overrides, "algorithm.num_updates_per_step=2")
    assert values["optim/grad_norm"] > 0


@pytest.mark.parametrize("name", list_advantages())
def test_estimators(model, tmp_path, name):
    options = ADVANTAGE_OPTIONS.get(name, "{}")
    values = two_steps(model, tmp_path, f"algorithm.advantage={name}", f"algorithm.advantage_options={options}")
    assert values["optim/grad_norm"] > 0


@pytest.mark.parametrize("name", list_corrections())
def test_corrections(model, tmp_path, name):
    values = two_steps(model, tmp_path, f"algorithm.correction={name}")
    # the engine samples from the trainer's own weights: nothing is truncated or rejected
    assert values["mismatch/max"] < 1e-4 and values.get("mismatch/rejected_tokens", 0) == 0


@pytest.mark.parametrize("overrides", OTHERS, ids=[" ".join(o).replace("algorithm.", "") for o in OTHERS])
def test_other_pieces(model, tmp_path, overrides):
    two_steps(model, tmp_path, *overrides)


def test_a_batch_that_is_all_masked_makes_no_update(model, tmp_path):
    """Every response of the random model is cut at the limit: with overlong masking nothing is left to train on."""
    overrides = ["algorithm.overlong_masking=true", "rollout.stop_token_ids=[]", "rollout.max_response_tokens=1"]
    parts = build(load_config([], short_run(model, tmp_path, *overrides)).config)
    before = [p.clone() for p in parts.actor.model.parameters()]
    trainer = Trainer(parts, Silent(), None, lambda score: None)
    values = trainer.step()[1]
    parts.generator.rewards.close()
    if values["rollout/truncated_fraction"] == 1:
        assert values["data/empty_updates"] == 1 and "optim/grad_norm" not in values
        assert all(torch.equal(a, b) for a, b in zip(before, parts.actor.model.parameters()))
    assert values["policy/masked_sequences"] == round(16 * values["rollout/truncated_fraction"])
