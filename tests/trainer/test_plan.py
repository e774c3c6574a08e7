"""The step runs exactly the passes that the configuration needs: forwards counted, and said so beforehand."""

import pytest
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.errors import ConfigError
from fastrl.trainer import actor, critic, full_kl
from fastrl.trainer.loop import Trainer
from fastrl.trainer.plan import check_engine, describe, make_plan
from fastrl.trainer.reporter import Silent
from fastrl.trainer.setup import build


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def passes(monkeypatch, model, tmp_path, *overrides):
    """Forward passes of one step: {"policy": n, "reference": n, "critic": n}."""
    config = load_config([], short_run(model, tmp_path, "run.max_tokens_per_microbatch=100000", *overrides)).config
    parts = build(config)
    counts = {"policy": 0, "reference": 0, "critic": 0}
    who = {id(parts.actor.model): "policy"}
    if parts.reference is not None:
        who[id(parts.reference.model)] = "reference"
    if parts.critic is not None:
        who[id(parts.critic.model)] = "critic"

    def counted(function):
        def forward(module, *rest):
            counts[who[id(module)]] += 1
            return function(module, *rest)

        return forward

    monkeypatch.setattr(actor, "inside", counted(actor.inside))
    monkeypatch.setattr(full_kl, "hidden_rows", counted(full_kl.hidden_rows))
    monkeypatch.setattr(critic, "inside", counted(critic.inside))
    trainer = Trainer(parts, Silent(), None, lambda score: None)
    trainer.step()
    parts.generator.rewards.close()
    return counts


CASES = [
    ([], (1, 0, 0)),  # one update: no old pass, no reference, no critic
    (["algorithm.num_updates_per_step=2"], (1 + 1 + 2, 0, 0)),  # the old pass shares the packing of both updates
    (["algorithm.num_epochs_per_batch=2"], (1 + 2, 0, 0)),
    (["algorithm.kl_loss_coef=0.1"], (1, 1, 0)),  # KL in the loss needs no old pass
    (["algorithm.kl_reward_coef=0.1"], (1 + 1, 1, 0)),
    (["algorithm.kl_loss_coef=0.1", "algorithm.kl_loss_kind=full"], (1, 1, 0)),  # the reference runs inside the update
    (["algorithm.kl_reward_coef=0.1", "algorithm.kl_reward_kind=full"], (1 + 1, 1, 0)),  # the KL's own pass
    (["algorithm.kl_reward_coef=0.1", "algorithm.kl_loss_coef=0.1", "algorithm.kl_loss_kind=full"], (1 + 1, 2, 0)),
    (["algorithm.advantage=gae"], (1, 0, 2)),  # values before, one critic update
    (["algorithm.policy_loss=gspo"], (1, 0, 0)),
    (["algorithm.policy_loss=clip_cov"], (1 + 1 + 1, 0, 0)),  # old pass, selection pass, update
    (["algorithm.correction=reject_geometric"], (1 + 1, 0, 0)),
    (["algorithm.correction=none"], (1, 0, 0)),
    (["algorithm.advantage=optimal_token_baseline"], (1 + 1, 0, 0)),
    (["algorithm.entropy_quantile=0.5"], (1 + 1 + 1, 0, 0)),
]


@pytest.mark.parametrize(("overrides", "expected"), CASES)
def test_forwards_of_a_step(monkeypatch, model, tmp_path, overrides, expected):
    counts = passes(monkeypatch, model, tmp_path, *overrides)
    assert (counts["policy"], counts["reference"], counts["critic"]) == expected


def test_the_clip_loss_of_a_ppo_step_is_the_kernel(monkeypatch, model, tmp_path):
    from fastrl.algorithms.losses import clip

    calls = []
    kernel = clip.clipped_policy_loss

    def counted(*arguments, **options):
        calls.append(options.get("reduction"))
        return kernel(*arguments, **options)

    monkeypatch.setattr(clip, "clipped_policy_loss", counted)
    passes(monkeypatch, model, tmp_path, "algorithm.advantage=gae", "algorithm.num_updates_per_step=2")
    assert calls == ["none", "none"]  # one micro-batch and one chunk per update


def test_the_plan_says_why(model, tmp_path):
    config = load_config(
        [], short_run(model, tmp_path, "algorithm.num_updates_per_step=2", "algorithm.advantage=gae")
    ).config
    plan = make_plan(config)
    assert plan.old_log_prob and plan.critic and not plan.reference and plan.gradient_in_forward
    text = "\n".join(describe(config))
    assert "2 updates per rollout batch" in text and "gae needs values" in text and "no KL term" in text
    on_policy = "\n".join(describe(load_config([], short_run(model, tmp_path)).config))
    assert "skipped: one update, ratio is exactly 1" in on_policy and "grpo needs none" in on_policy


class Mute:
    gives_log_probs = False


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"algorithm\.correction = token_truncate reads .*: set algorithm\.correction=none"),
        (["algorithm.correction=none", "algorithm.policy_loss=decoupled"], r"algorithm\.policy_loss = decoupled reads"),
        (["algorithm.correction=none"], None),
    ],
)
def test_an_engine_without_log_probs(model, tmp_path, overrides, message):
    config = load_config([], short_run(model, tmp_path, *overrides)).config
    if message is None:
        check_engine(config, Mute())
    else:
        with pytest.raises(ConfigError, match=message):
            check_engine(config, Mute())
