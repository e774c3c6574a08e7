"""A whole run whose two ranks share every micro-batch equals the run of one process: PPO with critic and reference."""

import json
from pathlib import Path

import pytest
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.errors import ConfigError, ModelError
from fastrl.run import run_training

VOLATILE = ("time", "memory/", "perf/")
PPO = [
    "algorithm.advantage=gae",
    "algorithm.advantage_options={bootstrap_truncated: true}",
    "algorithm.num_updates_per_step=2",
    "algorithm.kl_loss_coef=0.01",
    "algorithm.entropy_coef=0.01",
    "run.max_tokens_per_microbatch=64",
    "run.dtype=float64",
    "optim.total_steps=2",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def train(overrides):
    return run_training(load_config([], overrides))


def rows_of(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def steady(row):
    return {k: v for k, v in row.items() if not k.startswith(VOLATILE)}


def test_two_ranks_share_micro_batches(model, tmp_path):
    overrides = [o for o in short_run(model, tmp_path / "1") if not o.startswith(("algorithm.adv", "optim.total"))]
    one = rows_of(train([*overrides, *PPO]))
    shared = [*overrides, *PPO, f"run.dir={tmp_path / '2'}", "parallel.processes=2", "parallel.sequence=2"]
    two = rows_of(train(shared))
    assert len(one) == len(two) == 2
    for a, b in zip(one, two):
        assert steady(b) == pytest.approx(steady(a), rel=1e-9, abs=1e-12)
        assert b["perf/unique_tokens"] == a["perf/unique_tokens"], "counted once, although two ranks hold the batch"
        assert b["perf/model_flops"] == a["perf/model_flops"]
        assert b["perf/exchange_bytes"] > 0, "each rank got the sequences of the other"


def test_a_size_that_does_not_divide_the_ranks_is_refused(model, tmp_path):
    with pytest.raises((ConfigError, ModelError)) as caught:
        train(short_run(model, tmp_path, "parallel.processes=1", "parallel.sequence=2"))
    assert "parallel.sequence = 2 does not divide the 1 rank of this run" in str(caught.value)
    assert caught.value.exit_code == 2
