"""A whole run whose engine computes with the trainer's own weights."""

import importlib.util
import json

import pytest
import torch

from fastrl.config import load_config
from fastrl.run import run_training
from fastrl.trainer import engines

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def lines_of(tmp_path, *overrides):
    """metrics.jsonl of a short run on a random model."""
    from vllm_models import write_vllm_folder

    folder = write_vllm_folder(tmp_path / "model", "llama", tied=True)
    common = [
        f"model.path={folder}",
        f"run.dir={tmp_path / 'runs'}",
        "data.train=task:arithmetic",
        "algorithm.advantage=grpo",
        "reward.functions=[python:tiny_rewards:parity]",
        "rollout.num_prompts_per_step=4",
        "rollout.num_samples_per_prompt=4",
        "rollout.max_response_tokens=8",
        "optim.total_steps=3",
        "optim.lr=1e-2",
        "rollout.engine=vllm",
        "rollout.zero_copy=true",
        "logging.console=quiet",
    ]
    result = run_training(load_config([], [*common, *overrides]))
    return [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()], result


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_the_engines_log_probs_are_the_trainers_and_nothing_is_sent(tmp_path, monkeypatch, dtype, largest):
    monkeypatch.setattr(engines, "WeightSender", None)  # buckets would fail
    lines, folder = lines_of(tmp_path, f"run.dtype={dtype}")
    assert [line["rollout/policy_version"] for line in lines] == [0, 1, 2]
    assert all(line["mismatch/max"] <= largest for line in lines)
    assert all(line["mismatch/probe"] <= largest for line in lines)
    assert all(line["rollout/engine_restarts"] == 0 for line in lines)
    assert all(line["optim/grad_norm"] > 0 for line in lines)
    if dtype == "bfloat16":
        from fastrl.dist.checkpoint import load_checkpoint

        state = load_checkpoint(folder)[0]["policy"]
        assert {t.dtype for t in state["optimizer"]["masters"].values()} == {torch.float32}
        assert {t.dtype for t in state["model"].values()} == {torch.bfloat16}
