"""Each health rule speaks when it should, names a key that exists, and does not repeat itself."""

import re
from pathlib import Path

import pytest

from fastrl.config.schema import Config
from fastrl.report.health import RULES, HealthWatch
from fastrl.trainer.metric_names import METRICS

FINE = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/zero_variance_fraction": 0.1,
    "reward/unscorable": 0.0,
    "rollout/samples": 64.0,
    "rollout/truncated_fraction": 0.02,
    "rollout/empty_responses": 0.0,
    "policy/entropy": 0.8,
    "policy/clip_fraction/low": 0.01,
    "policy/clip_fraction/high": 0.02,
    "mismatch/k3/mean": 1e-7,
    "mismatch/ess": 0.999,
    "optim/skipped_updates": 0.0,
    "perf/nan_values": 0.0,
    "kl/reference": 0.01,
    "value/explained_variance": 0.3,
    "memory/device_total_gib": 139.0,
    "memory/device_peak_gib": 60.0,
}

# anchor -> (what changes in every step, steps until it is said, words that must be in the line)
CASES = {
    "skipped-updates": ({"optim/skipped_updates": 2.0}, 1, "2 updates were skipped"),
    "nan-values": ({"perf/nan_values": 128.0}, 1, "128 values were NaN"),
    "unscorable": ({"reward/unscorable": 3.0}, 1, "3 of 64 responses could not be scored"),
    "equal-rewards": ({"reward/max": 0.0, "reward/mean": 0.0}, 1, "all 64 rewards are 0"),
    "zero-variance": ({"reward/zero_variance_fraction": 0.37}, 1, "37% of groups have equal rewards"),
    "truncation": ({"rollout/truncated_fraction": 0.41}, 1, "41% of responses were cut"),
    "empty-responses": ({"rollout/empty_responses": 16.0}, 1, "25% of responses are empty"),
    "entropy-explosion": ({"policy/entropy": 4.0}, 4, "entropy rose from 0.8 to 4"),
    "entropy-collapse": ({"policy/entropy": 0.1}, 11, "entropy fell from 0.8 to 0.1"),
    "mismatch": ({"mismatch/k3/mean": 0.03}, 1, "k3 0.03 nats"),
    "clip-saturation": ({"policy/clip_fraction/high": 0.4}, 1, "41% of tokens were clipped"),
    "kl-drift": ({"kl/reference": 0.9}, 1, "0.9 nats per token away"),
    "critic": ({"value/explained_variance": -0.2}, 10, "explained variance -0.2"),
    "refills": ({"data/exhausted": 1.0, "data/dropped_groups": 12.0}, 1, "dropped 12 groups"),
    "device-memory": ({"memory/device_peak_gib": 135.0}, 1, "135.0 of 139.0 GiB"),
}


def test_a_healthy_run_is_silent():
    watch = HealthWatch()
    assert [line for step in range(1, 60) for line in watch.check(step, FINE)] == []
    assert HealthWatch().check(0, {"val/mean": 0.5}) == []
    assert HealthWatch().check(1, {}) == []


def test_every_rule_has_a_case():
    assert set(CASES) == {rule.anchor for rule in RULES}


@pytest.mark.parametrize("anchor", CASES)
def test_rule(anchor):
    change, after, words = CASES[anchor]
    watch = HealthWatch()
    step = 0
    if anchor.startswith("entropy"):  # the run starts well
        for step in (1, 2, 3):
            assert watch.check(step, FINE) == []
        after -= 3
    lines = []
    for number in range(1, after + 1):
        lines = watch.check(step + number, {**FINE, **change})
        if number < after:
            assert lines == [], f"too early, at step {step + number}"
    assert len(lines) == 1
    assert words in lines[0]
    assert lines[0].endswith(f"(docs/metrics.md#{anchor})")


def known_keys():
    sections = {name: field.annotation.model_fields for name, field in Config.model_fields.items()}
    return {f"{section}.{key}" for section, keys in sections.items() for key in keys}


@pytest.mark.parametrize("anchor", CASES)
def test_the_keys_a_line_names_exist(anchor):
    rule = next(rule for rule in RULES if rule.anchor == anchor)
    past = [{**FINE, **CASES[anchor][0]}] * 30
    line = rule.find(past[0], past, FINE)
    named = re.findall(r"\b(?:model|data|reward|rollout|algorithm|critic|optim|run|logging)\.\w+", line)
    assert named, "a line says which key to change"
    assert set(named) <= known_keys()
    explained = re.findall(r"\b(?:reward|rollout|algorithm|critic|optim|run)\.\w+", rule.why + rule.what)
    assert set(explained) <= known_keys()


def test_rules_read_metrics_that_exist():
    source = (Path(__file__).parents[2] / "fastrl" / "report" / "health.py").read_text()
    names = set(re.findall(r'"([a-z]+/[a-z0-9_/]+)"', source))
    assert len(names) > 15
    assert names <= set(METRICS)


def test_a_condition_that_stays_is_said_every_twenty_steps():
    watch = HealthWatch(repeat_steps=20)
    bad = {**FINE, "rollout/truncated_fraction": 0.5}
    said = [step for step in range(1, 62) if watch.check(step, bad)]
    assert said == [1, 21, 41, 61]


def test_learning_a_task_is_not_a_collapse():
    watch = HealthWatch()
    for step in (1, 2, 3):
        watch.check(step, {**FINE, "reward/mean": 0.02 * step})
    rising = [watch.check(step, {**FINE, "policy/entropy": 0.1, "reward/mean": 0.02 * step}) for step in range(4, 40)]
    assert not any(rising), "low entropy while the reward rises"
    solved = [watch.check(step, {**FINE, "policy/entropy": 0.05, "reward/mean": 0.98}) for step in range(40, 70)]
    assert not any(solved), "low entropy at the highest reward"


def test_easy_and_hard_prompts():
    watch = HealthWatch()
    easy = watch.check(1, {**FINE, "reward/zero_variance_fraction": 0.6, "reward/mean": 0.9})
    hard = HealthWatch().check(1, {**FINE, "reward/zero_variance_fraction": 0.6, "reward/mean": 0.1})
    assert "mix in harder prompts" in easy[0]
    assert "mix in easier prompts" in hard[0]


def test_equal_groups_do_not_matter_to_a_critic():
    equal = {**FINE, "reward/zero_variance_fraction": 0.6}
    assert HealthWatch().check(1, equal)
    assert HealthWatch().check(1, {**equal, "value/loss": 0.1}) == []
