"""A run saved on r ranks goes on on q: to the bit for q = r, to rounding otherwise; a kill during a save loses nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_folder import short_run, write_tiny_folder
from transformers import AutoModelForCausalLM

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import list_checkpoints, load_checkpoint
from fastrl.errors import CheckpointError
from fastrl.run import run_training
from fastrl.trainer.export import export_run

TESTS = Path(__file__).resolve().parents[1]
VOLATILE = ("time", "memory/", "perf/")
PPO = ["algorithm.advantage=gae", "algorithm.num_updates_per_step=2", "critic.lr=1e-3", "run.dtype=float64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def train(model, folder, processes, steps, *more, resume=None):
    overrides = short_run(
        model, folder, *PPO, f"parallel.processes={processes}", f"optim.total_steps={steps}", *more
    )
    return run_training(load_config([], overrides), resume=resume)


def state_of(run):
    """Weights and moments by name."""

    def walk(name, node):
        if isinstance(node, torch.Tensor):
            return {name: node}
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        return {k: v for key, child in items if key != "rng" for k, v in walk(f"{name}/{key}", child).items()}

    return walk("", load_checkpoint(run)[0])


def metrics_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Four steps on one rank, without a stop."""
    return train(model, tmp_path_factory.mktemp("whole"), 1, 4)


def close(run, whole):
    expected, found = state_of(whole), state_of(run)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-9 * (1 + tensor.norm()), name
    for row, other in zip(metrics_of(whole), metrics_of(run), strict=True):
        assert other == pytest.approx(row, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_resumed_on_another_number_of_ranks(model, tmp_path, whole, before, after):
    train(model, tmp_path, before, 2)
    close(train(model, tmp_path, after, 4, resume="auto"), whole)


def test_resumed_on_the_same_number_of_ranks_to_the_bit(model, tmp_path):
    """Saved beside the training this time; the export of a sharded checkpoint holds its weights."""
    straight = train(model, tmp_path / "a", 2, 4)
    train(model, tmp_path / "b", 2, 2, "run.async_checkpoint=true", "run.checkpoint_every_steps=1")
    again = train(model, tmp_path / "b", 2, 4, "run.async_checkpoint=true", resume="auto")
    expected, found = state_of(straight), state_of(again)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], t) for name, t in expected.items())
    assert metrics_of(straight) == metrics_of(again)
    exported = AutoModelForCausalLM.from_pretrained(export_run(again, tmp_path / "hf"), dtype=torch.float64)
    weights = {name: t for name, t in found.items() if name.startswith("/policy/model/")}
    state = exported.state_dict()
    assert weights and all(torch.equal(state[name.removeprefix("/policy/model/")], t) for name, t in weights.items())


KILL = """
import os, signal, sys
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem as fs
real = fs.FileSystem.create_stream
def killed(self, path, mode):
    if mode == "wb" and "step_000003" in str(path) and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, path, mode)
fs.FileSystem.create_stream = killed
"""


@pytest.mark.parametrize("later", ["false", "true"])
def test_a_rank_killed_during_a_save(model, tmp_path, later):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "models"), str(tmp_path)]),
        "OMP_NUM_THREADS": "1",
    }
    overrides = short_run(
        model,
        tmp_path,
        *PPO,
        "parallel.processes=2",
        "parallel.timeout_s=30",
        "optim.total_steps=6",
        "run.checkpoint_every_steps=1",
        "algorithm.policy_loss=kills_while_saving:plain",
        f"run.async_checkpoint={later}",
    )
    (tmp_path / "kills_while_saving.py").write_text(KILL + "from tiny_failures import _plain as plain\n")
    (tmp_path / "empty.yaml").write_text("{}\n")
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "fastrl", "train", str(tmp_path / "empty.yaml"), *overrides],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 1 and "rank 1 was ended by signal SIGKILL" in output, output
    assert time.monotonic() - started < 120
    run = tmp_path / "run"
    assert [c.step for c in list_checkpoints(run / "checkpoints")] == [1, 2]
    assert load_checkpoint(run)[1]["step"] == 2


def test_a_truncated_shard_is_named_and_the_one_before_it_offered(model, tmp_path):
    run = train(model, tmp_path, 2, 2, "run.checkpoint_every_steps=1")
    shard = run / "checkpoints" / "step_000002" / "tensors" / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 8)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp has \d+ bytes instead of .*step_000001: resume from"):
        train(model, tmp_path, 2, 3, resume="auto")
