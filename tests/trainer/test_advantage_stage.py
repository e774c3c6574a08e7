"""From scores to advantages: what counts, what is moved and what leaves, against numbers worked out by hand."""

import math

import pytest
import torch

from fastrl.config.schema import Config
from fastrl.data.batch import RolloutBatch
from fastrl.trainer.losses import OptimizerBatch, token_terms
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.setup import advantage_stage, loss_settings


def batch_of(lengths, scores, groups, **fields):
    """One-token prompts; every token sampled with log-prob -1 by trainer, engine and reference."""
    total, count = sum(lengths), len(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    ones = torch.full((total,), -1.0, dtype=torch.float64)
    start = {
        "prompt_ids": torch.zeros(max(groups) + 1, dtype=torch.int64),
        "prompt_cu_seqlens": torch.arange(max(groups) + 2),
        "response_ids": torch.zeros(total, dtype=torch.int64),
        "cu_seqlens": cu,
        "group_index": torch.tensor(groups),
        "group_id": torch.tensor(groups),
        "sample_id": torch.arange(count),
        "finish_reason": torch.zeros(count, dtype=torch.int8),
        "policy_version": torch.zeros(count, dtype=torch.int64),
        "response_mask": torch.ones(total, dtype=torch.bool),
        "rollout_log_prob": ones,
        "old_log_prob": ones,
        "ref_log_prob": ones,
        "scores": torch.tensor(scores, dtype=torch.float64),
        "valid": torch.ones(count, dtype=torch.bool),
    }
    return RolloutBatch(**(start | fields))


def stage(**algorithm):
    return advantage_stage(Config(algorithm={"correction": "none"} | algorithm))


def run(batch, **algorithm):
    metrics = Metrics()
    return stage(**algorithm)(batch, metrics), metrics.reduce()


def test_an_unscorable_sample_has_no_part_in_the_whitening():
    valid = torch.tensor([True, True, False])
    batch = batch_of([1, 2, 3], [1.0, 4.0, 0.0], [0, 1, 2], valid=valid)
    out, _ = run(batch, advantage="reinforce_plus_plus")
    # returns 1, 4, 4 of the tokens that count: mean 3, variance 3
    assert out.advantages[:3].tolist() == pytest.approx([-2 / math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3)])
    assert out.loss_mask.tolist() == [True] * 3 + [False] * 3


def test_rewards_of_single_tokens_are_moved_to_sampled_ones_and_counted():
    mask = torch.tensor([False, True, False, True])
    given = torch.tensor([8.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    batch = batch_of([4], [10.0], [0], response_mask=mask, token_level_scores=given)
    out, values = run(batch, advantage="reinforce_plus_plus", advantage_options={"whiten": False})
    assert out.token_level_scores.tolist() == [0.0, 2.5, 0.0, 10.0]
    assert out.advantages.tolist() == [0.0, 12.5, 0.0, 10.0]
    assert (values["reward/moved_to_sampled"], values["reward/moved_nowhere"]) == (1, 1)


def test_kl_is_taken_off_each_sampled_token_and_moves_the_coefficient():
    ref = torch.tensor([-1.5, -1.0, -3.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    batch = batch_of([3], [1.0], [0], ref_log_prob=ref, response_mask=mask)
    made = stage(
        advantage="reinforce_plus_plus", advantage_options={"whiten": False}, kl_reward_coef=0.2,
        kl_controller="adaptive", kl_target=0.1, kl_horizon=10,
    )  # fmt: skip
    metrics = Metrics()
    out = made(batch, metrics)
    # x = -1 - ref = 0.5, 0 on the sampled tokens: rewards -0.1, 1
    assert out.token_level_rewards.tolist() == pytest.approx([-0.1, 1.0, 0.0])
    assert out.advantages.tolist() == pytest.approx([0.9, 1.0, 0.0])
    values = metrics.reduce()
    assert values["kl/reward"] == pytest.approx(0.25) and values["kl/reward_coef"] == 0.2
    # KL/target - 1 = 1.5, clipped to 0.2; one sequence of a horizon of 10
    assert made.kl_controller.value == pytest.approx(0.2 * (1 + 0.2 / 10))


def test_an_overlong_response_leaves_the_loss_and_if_asked_the_baseline():
    cut = torch.tensor([0, 0, 1], dtype=torch.int8)
    batch = batch_of([1, 1, 1], [1.0, 0.0, 5.0], [0, 0, 0], finish_reason=cut)
    options = {"std_normalize": False}
    out, values = run(batch, advantage="grpo", advantage_options=options, overlong_masking=True)
    assert out.advantages.tolist() == pytest.approx([-1.0, -2.0, 3.0])
    assert out.loss_mask.tolist() == [True, True, False] and values["policy/masked_sequences"] == 1
    out, _ = run(
        batch, advantage="grpo", advantage_options=options, overlong_masking=True, overlong_leaves_baseline=True
    )
    assert out.advantages.tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert out.valid.all()  # the critic still learns from it


def test_a_rejected_response_leaves_the_loss_and_the_baseline_and_is_counted():
    engine = torch.tensor([-1.0, -1.0, -1.5], dtype=torch.float64)
    batch = batch_of([1, 1, 1], [1.0, 0.0, 5.0], [0, 0, 0], rollout_log_prob=engine)
    out, values = run(
        batch, advantage="grpo", advantage_options={"std_normalize": False}, correction="reject_geometric"
    )
    assert out.advantages.tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert out.loss_mask.tolist() == [True, True, False] and out.valid.all()
    assert values["mismatch/rejected_tokens"] == 1 and values["mismatch/rejected_sequences"] == 1
    assert values["mismatch/rejected_sequences/seq_mean_k1"] == pytest.approx(1 / 3)


def test_gdpo_takes_the_weights_of_the_rewards():
    components = {"style": torch.tensor([0.0, 1.0]).double(), "exact": torch.tensor([1.0, 0.0]).double()}
    config = Config(
        algorithm={"advantage": "gdpo", "correction": "none", "advantage_options": {"whiten": False}},
        reward={"functions": ["exact", "python:my.module:style"], "weights": [3.0, 1.0]},
    )
    batch = batch_of([1, 1], [3.0, 1.0], [0, 0], components=components)
    out = advantage_stage(config)(batch, Metrics())
    unit = math.sqrt(0.5)  # (1 - 1/2) / std, std = sqrt(1/2)
    assert out.advantages.tolist() == pytest.approx([2 * unit, -2 * unit], rel=1e-5)


def test_weights_made_inside_the_update_are_counted_like_those_before_it():
    engine = torch.tensor([-1.0, -2.0, math.nan], dtype=torch.float64)
    batch = batch_of([3], [1.0], [0], old_log_prob=None, rollout_log_prob=engine, advantages=torch.ones(3).double())
    settings = loss_settings(Config(algorithm={"advantage": "grpo"}))
    members = OptimizerBatch(batch, torch.tensor([0]), torch.ones(3, dtype=torch.float64))
    log_prob = torch.full((3,), -1.0, dtype=torch.float64)
    loss, stats = token_terms(settings, members, log_prob, None, torch.arange(3))
    # ratios 1, e and unknown; the cap is 2, an unknown one weighs 1
    assert stats["applied_weight"].tolist() == [1.0, 2.0, 1.0] and stats["clipped_weight"].tolist() == [0.0, 1.0, 0.0]
    assert loss.tolist() == [-1.0, -2.0, -1.0]
