"""N + M steps equal N, kill, resume, M steps, bit for bit; also across an epoch's end and with a critic."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.run import run_training

TESTS = Path(__file__).resolve().parents[1]
VOLATILE = (
    "time/",
    "memory/",
    "perf/tokens_per_s",
    "perf/generate",
    "perf/samples",
    "perf/train_tokens",
    "perf/flops_per_s",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def train(overrides, resume=None):
    return run_training(load_config([], overrides), resume=resume)


def lines_of(run):
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(VOLATILE)} for row in rows if row["step"] > 0
    ]


def weights_of(run):
    tensors, state = load_checkpoint(Path(run))
    flat = {}

    def walk(prefix, node):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, torch.Tensor):
                flat[f"{prefix}/{key}"] = value
            elif isinstance(value, dict | list):
                walk(f"{prefix}/{key}", value)

    walk("", {k: v for k, v in tensors.items() if k != "rng"})
    return flat, state


PPO = ["algorithm.advantage=gae", "algorithm.num_updates_per_step=2", "critic.lr=1e-3", "critic.warmup_steps=1"]
KL = ["algorithm.kl_reward_coef=0.1", "algorithm.kl_controller=adaptive", "algorithm.kl_target=0.01"]
EPOCH = ["data.train_options={size: 10}"]  # 3 steps an epoch, the last of 2 prompts: step 3 ends epoch 1


@pytest.mark.parametrize("extra", [[], PPO, EPOCH, [*EPOCH, *KL, "algorithm.entropy_target=1.0"]])
def test_resumed_run_equals_the_uninterrupted_one(model, tmp_path, extra):
    whole = train(short_run(model, tmp_path / "a", *extra, "optim.total_steps=6"))
    first = train(short_run(model, tmp_path / "b", *extra, "optim.total_steps=3"))
    again = train(short_run(model, tmp_path / "b", *extra, "optim.total_steps=6"), resume="auto")
    assert again == first
    assert lines_of(whole) == lines_of(again)
    expected, state = weights_of(whole)
    got, resumed = weights_of(again)
    assert expected.keys() == got.keys() and all(torch.equal(expected[k], got[k]) for k in expected)
    state.pop("logger"), resumed.pop("logger")
    assert state == resumed


def test_killed_run_resumes_bit_for_bit(model, tmp_path):
    overrides = short_run(model, tmp_path / "b", "optim.total_steps=8", "run.checkpoint_every_steps=1")
    command = [sys.executable, "-m", "fastrl", "train", *config_file(tmp_path, overrides)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "models")])}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((tmp_path / "b" / "run" / "checkpoints").glob("step_000003*")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = train(overrides, resume="auto")
    whole = train(short_run(model, tmp_path / "a", "optim.total_steps=8", "run.checkpoint_every_steps=1"))
    assert lines_of(whole) == lines_of(again)
    expected, got = weights_of(whole)[0], weights_of(again)[0]
    assert all(torch.equal(expected[k], got[k]) for k in expected)


def config_file(folder, overrides):
    """Command line arguments: an empty file and the overrides."""
    path = folder / "empty.yaml"
    path.write_text("{}\n")
    return [str(path), *overrides]


def wait_for(condition, process, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_folder_is_never_shared(model, tmp_path):
    train(short_run(model, tmp_path, "optim.total_steps=1"))
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        train(short_run(model, tmp_path, "optim.total_steps=1"))


def test_resume_without_a_checkpoint_says_where_it_looked(model, tmp_path):
    with pytest.raises(RuntimeError, match="no checkpoint under"):
        train(short_run(model, tmp_path), resume="auto")


def test_resume_with_a_critic_the_checkpoint_lacks(model, tmp_path):
    train(short_run(model, tmp_path, "optim.total_steps=1"))
    with pytest.raises(RuntimeError, match="critic"):
        train(short_run(model, tmp_path, *PPO, "optim.total_steps=2"), resume="auto")


def test_the_configuration_counts_after_a_resume(model, tmp_path):
    """Rates, betas and decay are what the configuration says now, and what changed is said."""
    first = train(short_run(model, tmp_path, "optim.total_steps=1"))
    changed = ["optim.total_steps=2", "optim.lr=0.25", "optim.betas=[0.5,0.75]", "optim.weight_decay=0.125"]
    train(short_run(model, tmp_path, *changed), resume="auto")
    decayed, plain = load_checkpoint(first)[0]["policy"]["optimizer"]["param_groups"]
    assert [tuple(group["betas"]) for group in (decayed, plain)] == [(0.5, 0.75)] * 2
    assert (decayed["weight_decay"], plain["weight_decay"], decayed["lr"]) == (0.125, 0.0, 0.25)
    log = (first / "log.txt").read_text()
    assert "changed since the last start: optim.lr = 0.001 -> 0.25, optim.betas = [0.9, 0.999] -> [0.5, 0.75]" in log


def test_a_damaged_newest_checkpoint_is_named(model, tmp_path):
    run = train(short_run(model, tmp_path, "optim.total_steps=2", "run.checkpoint_every_steps=1"))
    (run / "checkpoints" / "step_000002" / "manifest.json").write_text("{")
    train(short_run(model, tmp_path, "optim.total_steps=2"), resume="auto")
    log = (run / "log.txt").read_text()
    assert "step_000002 is damaged (its manifest cannot be read) and was passed over" in log
    assert "resumed at step 1" in log and [row["step"] for row in lines_of(run)] == [1, 2]


def test_other_prompts_after_a_resume_are_said_plainly(model, tmp_path):
    run = train(short_run(model, tmp_path, "optim.total_steps=1"))
    train(short_run(model, tmp_path, "optim.total_steps=2", "run.seed=5"), resume="auto")
    assert "warning run.seed or data.shuffle changed since the checkpoint" in (run / "log.txt").read_text()


def test_resume_of_a_finished_run_says_so(model, tmp_path):
    run = train(short_run(model, tmp_path, "optim.total_steps=2"))
    before = (run / "metrics.jsonl").read_text()
    train(short_run(model, tmp_path, "optim.total_steps=1"), resume="auto")
    assert (run / "metrics.jsonl").read_text() == before
    assert "nothing left to do: optim.total_steps says 1" in (run / "log.txt").read_text()


def test_a_dry_run_looks_for_the_checkpoint(model, tmp_path, capsys):
    loaded = load_config([], short_run(model, tmp_path, "optim.total_steps=1"))
    with pytest.raises(RuntimeError, match="no checkpoint under"):
        run_training(loaded, resume="auto", dry_run=True)
    with pytest.raises(RuntimeError, match="there is no checkpoint in nowhere"):
        run_training(loaded, resume="nowhere", dry_run=True)
    run = run_training(loaded)
    run_training(loaded, resume="auto", dry_run=True)
    assert f"resumes       {run}/checkpoints/step_000001" in capsys.readouterr().out


def test_the_written_config_reloads_equal(model, tmp_path):
    loaded = load_config([], short_run(model, tmp_path, "optim.total_steps=1"))
    folder = run_training(loaded)
    assert load_config([folder / "config.yaml"]).config == loaded.config
