"""Starting ranks: one run on 1 or 2 processes gives the same numbers, and what is wrong with processes is named."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.dist.mesh import mesh_shape
from fastrl.errors import ConfigError, DataError, ProcessError
from fastrl.run import run_training

sys.path.insert(0, str(Path(__file__).parent))
from launched import launch_body

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "models")]),
    "OMP_NUM_THREADS": "1",
}
VOLATILE = ("time", "memory/", "perf/")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def train(overrides):
    return run_training(load_config([], overrides))


def metrics_of(run):
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]


def rollouts_of(run):
    """Lines of each step's file, their advantages apart (they agree to rounding)."""
    files = {path.name: path.read_text().splitlines() for path in sorted((Path(run) / "rollouts").iterdir())}
    rows = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
    return rows, {name: [row.pop("advantage") for row in lines if row["split"] == "train"] for name, lines in rows.items()}


def test_two_processes_train_as_one_does(model, tmp_path):
    short = ["run.dtype=float64", "optim.total_steps=2", "rollout.num_prompts_per_step=5"]
    short += ["data.validation=task:arithmetic", "data.validation_options={size: 3}", "logging.rollouts_max_samples=18"]
    runs = [
        train(short_run(model, tmp_path / "1", *short)),
        train(short_run(model, tmp_path / "2", *short, "parallel.processes=2")),
    ]
    one, two = map(metrics_of, runs)
    assert len(one) == len(two) == 3  # a validation, two steps
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        assert b == pytest.approx(a, rel=1e-9, abs=1e-12)
    (rows, advantages), (other_rows, other_advantages) = map(rollouts_of, runs)
    assert rows == other_rows and [len(lines) for lines in rows.values()] == [3, 18, 21]
    assert [row["sample_id"] for row in rows["step_000001.jsonl"]] == list(range(18))
    assert all(other_advantages[name] == pytest.approx(advantages[name], rel=1e-9, abs=1e-12) for name in rows)


def test_an_error_of_all_ranks_comes_back_as_itself(model, tmp_path):
    overrides = [o for o in short_run(model, tmp_path, "parallel.processes=2") if not o.startswith("data.")]
    with pytest.raises(DataError, match="empty.jsonl") as caught:
        (tmp_path / "empty.jsonl").write_text("")
        train([*overrides, f"data.train={tmp_path / 'empty.jsonl'}"])
    assert caught.value.exit_code == 2 and "Traceback" not in str(caught.value)


def test_gradients_of_ranks_are_summed():
    body = """
from fastrl.dist.collectives import sum_gradients
ps = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
ps[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
if rank == 1:
    ps[1].grad = torch.tensor([5.0, 0.5])
sum_gradients(ps)
return [p.grad.tolist() for p in ps]
"""
    assert launch_body(body, 2) == [[[3.0, 6.0], [5.0, 0.5], [0.0, 0.0]]] * 2


@pytest.mark.parametrize(
    ("size", "replicate", "shard", "shape"), [(1, None, None, (1, 1)), (4, None, None, (1, 4)), (4, 2, None, (2, 2)), (4, None, 1, (4, 1)), (4, 2, 2, (2, 2))]
)
def test_mesh_shapes(size, replicate, shard, shape):
    assert mesh_shape(size, replicate, shard) == shape


@pytest.mark.parametrize(("size", "replicate", "shard"), [(4, 3, None), (4, 2, 1), (2, 1, 4), (4, None, 3), (2, None, 4)])
def test_a_mesh_that_does_not_fit(size, replicate, shard):
    named = f"parallel.replicate = {replicate}" if replicate else f"parallel.shard = {shard}"
    with pytest.raises(ConfigError, match=rf"{named}.* does not divide {size} processes"):
        mesh_shape(size, replicate, shard)


def rank_process(port, **more):
    """Rank 0 of 2 as another launcher would start it."""
    code = (
        "import torch; from fastrl.dist.mesh import process_group\n"
        "with process_group(torch.device('cpu'), 2.0): pass"
    )
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT | place | more, capture_output=True, text=True, timeout=60
    )


def test_a_rank_that_never_joins_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = rank_process(port)
    assert result.returncode != 0
    assert f"rank 1 of 2 did not join at 127.0.0.1:{port} within 2 s (parallel.timeout_s)" in result.stderr


def test_a_rank_that_never_joins_is_shown():
    before = """
import os, time
def lost_on_the_way():
    time.sleep(100)
if os.environ["RANK"] == "1":
    lost_on_the_way()
"""
    with pytest.raises(ProcessError) as caught:
        launch_body("return 0", 2, timeout_s=3.0, before=before)
    said = str(caught.value)
    assert "rank 1 of 2 did not join" in said
    assert re.search(r"rank 1 did not take part: it was in phase starting\n.*in lost_on_the_way", said, re.DOTALL), said


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = rank_process(port)
    assert result.returncode != 0
    assert f"the port of 127.0.0.1:{port} is in use" in result.stderr, result.stderr[-2000:]


@pytest.mark.slow
def test_torchrun_runs_the_same_code(model, tmp_path):
    (tmp_path / "empty.yaml").write_text("{}\n")
    short = ["run.dtype=float64", "optim.total_steps=1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--rdzv-backend", "c10d", "-m", "fastrl", "train", str(tmp_path / "empty.yaml")]
    overrides = short_run(model, tmp_path / "2", *short)
    result = subprocess.run([*command, *overrides], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    one = metrics_of(train(short_run(model, tmp_path / "1", *short)))
    assert metrics_of(tmp_path / "2" / "run")[0] == pytest.approx(one[0], rel=1e-9, abs=1e-12)
