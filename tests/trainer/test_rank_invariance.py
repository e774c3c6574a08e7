"""One, two or four ranks, sharded or whole: the same rollouts, gradient, metrics and weights, in double precision."""

import json
import sys
from pathlib import Path

import pytest
import torch
from test_invariance import MODES, allowed_modes, gradient
from tiny_folder import short_run, write_tiny_folder

from fastrl.algorithms.registry import list_policy_losses
from fastrl.config.load import load_config
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.run import run_training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist"))
from launched import launch_body

VOLATILE = ("time", "memory/", "perf/")
LAYOUTS = {"2": [], "2 whole": ["parallel.shard=1"], "4": [], "4 replicated": ["parallel.replicate=2"]}
GRPO = [
    "algorithm.dynamic_sampling=true",  # groups without spread are dropped and replaced
    "algorithm.max_refills=1",
    "rollout.num_samples_per_prompt=2",
    "rollout.stop_token_ids=[5,9,17,23,31]",  # uneven lengths
    "algorithm.num_updates_per_step=2",
    "algorithm.kl_loss_coef=0.05",
]
PPO = [
    "algorithm.advantage=gae",
    "algorithm.num_updates_per_step=2",
    "algorithm.kl_reward_coef=0.05",
    "algorithm.correction=reject_geometric",
    "rollout.stop_token_ids=[5,9,17,23,31]",
    "critic.lr=1e-3",
    "rollout.num_prompts_per_step=3",  # fewer than ranks
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def run(model, folder, *overrides):
    """(metrics of each step, samples by id, weights and moments) of five steps in float64."""
    five = ["run.dtype=float64", "optim.total_steps=5", "logging.rollouts_max_samples=1000"]
    path = run_training(load_config([], short_run(model, folder, *five, *overrides)))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]
    samples = {}
    for file in sorted((path / "rollouts").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            samples[sample["step"], sample["sample_id"]] = sample["response"]
    return rows, samples, flat(load_checkpoint(path)[0])


def flat(tree, name=""):
    """Tensors of a nested state by name, without random states."""
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {k: v for key, node in items if key != "rng" for k, v in flat(node, f"{name}/{key}").items()}


def compare(one, other):
    (rows, samples, weights), (rows2, samples2, weights2) = one, other
    assert samples and list(samples.items()) == list(samples2.items()), "rollouts differ"
    assert len(rows) == len(rows2)
    for a, b in zip(rows, rows2):
        assert a.keys() == b.keys()
        assert b == pytest.approx(a, rel=1e-9, abs=1e-11)
    assert weights.keys() == weights2.keys()
    for name, tensor in weights.items():
        assert (weights2[name] - tensor).norm() <= 1e-9 * (1 + tensor.norm()), name


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    return {name: run(model, tmp_path_factory.mktemp(name), *settings) for name, settings in RECIPES.items()}


RECIPES = {"grpo": GRPO, "ppo": PPO}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_five_steps(model, tmp_path, alone, recipe, layout):
    processes = f"parallel.processes={layout.split()[0]}"
    compare(alone[recipe], run(model, tmp_path, *RECIPES[recipe], processes, *LAYOUTS[layout]))


def test_the_recipes_cover_what_they_should(alone):
    """Groups are dropped, lengths differ, and the numbers are not trivial."""
    rows, samples, _ = alone["grpo"]
    assert sum(row["data/dropped_groups"] for row in rows) > 0
    assert len({len(text) for text in samples.values()}) > 2
    assert all(row["optim/grad_norm"] > 0 for row in [*rows, *alone["ppo"][0]])


BODY = """
import json
from pathlib import Path
from test_invariance import MODES, allowed_modes, gradient
from fastrl.algorithms.registry import list_policy_losses
from fastrl.dist.mesh import make_mesh
mesh = make_mesh(torch.device("cpu"), {replicate}, None)
for name, mode, correction in json.loads('{cases}'):
    loss, flat = gradient(
        name, mode, torch.float64, max_tokens=12, share=True, correction=correction, mesh=mesh
    )
    expected = torch.load(Path("{folder}") / f"{{name}} {{mode}} {{correction}}.pt", weights_only=True)
    assert abs(loss - expected["loss"]) <= 1e-9 * (1 + abs(expected["loss"])), (name, mode, loss, expected["loss"])
    difference = (flat - expected["flat"]).norm() / expected["flat"].norm()
    assert difference <= 1e-9, (name, mode, float(difference))
return True
"""


def gradients_agree(cases, folder, size, replicate):
    for name, mode, correction in cases:
        loss, expected = gradient(name, mode, torch.float64, max_tokens=1000, share=True, correction=correction)
        torch.save({"loss": loss, "flat": expected}, folder / f"{name} {mode} {correction}.pt")
    body = BODY.format(replicate=replicate, cases=json.dumps(cases), folder=folder)
    assert launch_body(body, size) == [True] * size


def test_gradients_of_sharded_ranks(tmp_path):
    """With an empty response, a masked token, and three groups for two ranks."""
    cases = [("clip", MODES[0], True), ("gspo", allowed_modes("gspo")[0], False), ("clip_cov", MODES[0], False)]
    gradients_agree(cases, tmp_path, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("replicate", [1, 2])
def test_gradients_of_every_loss_and_mode(tmp_path, replicate):
    """Three groups for four ranks: one has nothing and takes part."""
    cases = [(name, mode, c) for name in list_policy_losses() for mode in allowed_modes(name) for c in (False, True)]
    gradients_agree(cases, tmp_path, 4, replicate)


def test_the_memory_budget_counts_what_a_rank_holds(model):
    """Sharded over two ranks: half each, and a gathered layer; whole on two ranks: all of it on each."""
    body = f"""
from torch.distributed.fsdp import fully_shard
from fastrl.config.load import load_config
from fastrl.models.load import load_model
from fastrl.trainer.engine_memory import GIB, budget
config = load_config([], ["model.path={model}", "data.train=task:arithmetic", "optim.total_steps=1"]).config
def sizes():
    found = budget(config, model, kv_bytes=None, sleep_level=0)
    return [found.parameters * GIB, found.optimizer * GIB, found.layer > 0, found.engine_weights * GIB]
model = load_model("{model}")
numbers = sum(p.numel() for p in model.parameters())
whole = sizes()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
return [numbers, whole, sizes()]
"""
    (numbers, whole, first), (_, _, second) = launch_body(body, 2)
    assert whole == [4 * numbers, 8 * numbers, False, 4 * numbers]
    assert first[0] + second[0] == 4 * numbers and first[1] + second[1] == 8 * numbers
    assert first[2] and first[3] == 4 * numbers and first[0] < 4 * numbers
