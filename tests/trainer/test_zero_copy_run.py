"""vLLM computing with the trainer's own weights: against Hugging Face, and against a run that delivers them."""

import importlib.util
import json
import os
import signal

import pytest
import torch
from test_vllm_engine import TOLERANCE, check_samples, follow_updates, make, names, requests, run
from tiny_folder import short_run
from vllm_models import move, plain_model, write_vllm_folder

from fastrl.config import load_config
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.errors import EngineError
from fastrl.rollout.engine import SamplingParams
from fastrl.run import run_training
from fastrl.trainer import engine_links

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
GREEDY = SamplingParams(max_tokens=24)


def test_child_follows_updates_that_move_nothing(tmp_path, monkeypatch):
    """Greedy tokens and log-probs of Hugging Face after 3 updates, a death, key/value-only sleep; faults are named."""
    monkeypatch.setattr(engine_links, "WeightSender", None)  # buckets would fail
    folder = write_vllm_folder(tmp_path, "qwen2", tied=False)
    model = plain_model(folder)
    engine, sharing = make(folder, model, "rollout.zero_copy=true", with_sharing=True)
    shared = sharing.weights
    rows = {r.name: (t.name, r.first) for t in shared.layout.tensors for r in t.rows}
    fused = shared.layout.engine_views(shared.block)
    for name, parameter in model.named_parameters():
        whole, first = rows[name]
        assert parameter.data_ptr() == fused[whole][first:].data_ptr(), name
    assert rows["model.layers.1.self_attn.k_proj.weight"] == ("model.layers.1.self_attn.qkv_proj.weight", 128)
    assert rows["model.layers.0.mlp.up_proj.weight"] == ("model.layers.0.mlp.gate_up_proj.weight", 48)
    sent, publish = [], shared.publish
    shared.publish = lambda *args, **kw: sent.append(publish(*args, **kw)) or sent[-1]
    try:
        follow_updates(engine, model, steps=3)
        assert [d.bytes for d in sent] == [0] * 4 and all(len(d.checksums) == len(fused) for d in sent)
        engine.sleep(0)
        move(model, seed=9)  # the engine sleeps while the optimizer writes
        engine.wake(("weights",))
        engine.update_weights(model, 4)
        engine.wake(("kv",))
        check_samples(engine.generate(requests(0.0), GREEDY), model, 0.0, 4)

        wanted = names(engine.generate(requests(0.7, 7), GREEDY))
        iterator = engine.generate(requests(0.7, 7), GREEDY)
        seen = [next(iterator)]
        os.kill(engine.link.process.pid, signal.SIGKILL)
        seen += list(iterator)
        assert names(seen) == wanted and engine.health().restarts == 1
        check_samples(seen, model, 0.7, 4)

        sums = shared.checksums
        shared.checksums = lambda: {n: v + (n == "model.norm.weight") for n, v in sums().items()}
        with pytest.raises(EngineError, match=r"model\.norm\.weight"):
            engine.update_weights(model, 5)
        shared.checksums = sums
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        with pytest.raises(EngineError, match=r"lm_head\.weight has left the memory shared with the engine"):
            engine.update_weights(model, 6)
    finally:
        engine.close()


def test_an_engine_of_another_layout_gets_buckets(tmp_path):
    """GPT-2's matrices stand the other way round in vLLM: it refuses, says so, and is given its weights as ever."""
    folder = write_vllm_folder(tmp_path, "gpt2", tied=True)
    model = plain_model(folder)
    engine, sharing = make(folder, model, "rollout.zero_copy=true", with_sharing=True)
    try:
        engine.ready()
        assert sharing.weights is None
        assert "c_attn.weight" in sharing.problem
        check_samples(engine.generate(requests(0.0), GREEDY), model, 0.0, 0)
        move(model, seed=1)
        engine.update_weights(model, 1)
        check_samples(engine.generate(requests(0.0), GREEDY), model, 0.0, 1)
    finally:
        engine.close()


def test_in_process(tmp_path):
    """The same in the trainer's process, where nothing has to be mapped."""
    assert "in process: fine" in run("vllm_in_process.py", str(tmp_path), "rollout.zero_copy=true")


def train(tmp_path, folder, *overrides):
    """(metrics, policy of the last checkpoint) of 3 steps."""
    base = short_run(folder, tmp_path, "rollout.engine=vllm", "optim.total_steps=3", "optim.lr=1e-2")
    result = run_training(load_config([], [*base, *overrides]))
    lines = [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()]
    return lines, load_checkpoint(result)[0]["policy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_is_that_of_a_run_that_delivers(tmp_path, monkeypatch, dtype):
    """Three steps with weights in common: probe and mismatch within rounding; in float32 the same gradients."""
    folder = write_vllm_folder(tmp_path / "model", "llama", tied=True)
    largest = {"float32": TOLERANCE, "bfloat16": 0.1}[dtype]
    plain = train(tmp_path, folder, "run.name=delivered") if dtype == "float32" else None
    monkeypatch.setattr(engine_links, "WeightSender", None)  # buckets would fail
    lines, policy = train(tmp_path, folder, "run.name=common", f"run.dtype={dtype}", "rollout.zero_copy=true")
    assert [line["rollout/policy_version"] for line in lines] == [0, 1, 2]
    assert all(line["mismatch/abs/mean"] <= largest and line["mismatch/probe"] <= largest for line in lines)
    assert all(line["rollout/engine_restarts"] == 0 for line in lines)
    assert any(line["optim/grad_norm"] > 0 for line in lines)
    assert {t.dtype for t in policy["model"].values()} == {torch.float32}  # masters
    if plain is None:
        return
    assert all(line["mismatch/max"] <= TOLERANCE for line in lines)
    for ours, theirs in zip(lines, plain[0], strict=True):
        for name in ("optim/grad_norm", "policy/loss", "reward/mean", "rollout/response_tokens"):
            assert ours.get(name) == theirs.get(name), name
    for name, tensor in plain[1]["model"].items():
        assert torch.equal(policy["model"][name], tensor), name
    for number, state in plain[1]["optimizer"]["state"].items():  # what all gradients have left
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(policy["optimizer"]["state"][number][moment], state[moment])
