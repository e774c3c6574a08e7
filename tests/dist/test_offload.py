"""parallel.offload changes where things wait, never a number: two gloo ranks with and without it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.run import run_training

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "trainer")]
from launched import launch_body
from test_rank_invariance import flat

VOLATILE = ("time", "memory/", "perf/")
SETTINGS = [
    "optim.total_steps=2",
    "algorithm.kl_loss_coef=0.1",
    "algorithm.num_updates_per_step=2",
    "parallel.processes=2",
]


def run(model, folder, *overrides):
    path = run_training(load_config([], short_run(model, folder, *SETTINGS, *overrides)))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows], flat(load_checkpoint(path)[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    return run(model, tmp_path_factory.mktemp("none"), "parallel.offload=none")


OPTIONS = ["parameters", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "optimizer"))]


@pytest.mark.parametrize("offload", OPTIONS)
def test_the_numbers_are_the_same(model, plain, tmp_path, offload):
    rows, weights = run(model, tmp_path, f"parallel.offload={offload}")
    assert rows == plain[0] and len(rows) == 2
    assert weights.keys() == plain[1].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain[1].items())


BODY = """
from fastrl.dist.fsdp import load_sharded, resident
from fastrl.dist.mesh import make_mesh
from fastrl.models.load import load_model
cpu = torch.device("cpu")
out = []
for offload in (True, False):
    model = load_sharded(load_model, "{model}", make_mesh(cpu, 1, None), cpu, dtype=torch.float32, offload_parameters=offload)
    moves = []
    model.to = moves.append
    with resident(model, torch.device("cuda"), offload=True):
        out.append(len(moves))
    policy = type(model._get_fsdp_state()._fsdp_param_group.offload_policy).__name__
    out.append([len(moves), policy])
return out
"""


def test_a_model_that_waits_on_the_host_is_not_moved(model):
    """FSDP2 refuses parameters that it offloads anywhere else than in CPU memory."""
    expected = [0, [0, "CPUOffloadPolicy"], 1, [2, "OffloadPolicy"]]
    assert launch_body(BODY.format(model=model), 2) == [expected] * 2
