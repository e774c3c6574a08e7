"""vLLM against Hugging Face: after every update the same greedy tokens and log-probs, whatever happens to it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_folder import short_run
from vllm_models import move, plain_model, reference_log_probs, write_vllm_folder

from fastrl.config.load import load_config
from fastrl.data.batch import FinishReason
from fastrl.errors import ConfigError, EngineError
from fastrl.models.load import load_tokenizer, stop_token_ids
from fastrl.rollout.engine import GenerationRequest, SamplingParams
from fastrl.rollout.external import ExternalEngine
from fastrl.run import run_training
from fastrl.trainer.engines import make_engine
from fastrl.trainer.shared_engine import share_weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
HERE = Path(__file__).resolve().parent
LONG = [5 + i % 40 for i in range(70)]  # more than two blocks of keys and values: found in the prefix cache
PROMPTS = [LONG, [*LONG, 7, 8], [1, 9, 11]]
TOLERANCE = 1e-4  # fp32, nats


def make(folder: str, model, *more: str, with_sharing: bool = False):
    """The engine of a run; on request also whether its weights are the trainer's."""
    config = load_config(
        [],
        [
            *short_run(folder, "unused"),
            "rollout.engine=vllm",
            "data.max_prompt_tokens=80",
            "rollout.max_response_tokens=24",
            *more,
        ],
    ).config
    stop_ids = frozenset(stop_token_ids(model, load_tokenizer(folder)))
    sharing = share_weights(config, model)
    engine = make_engine(config, model, load_tokenizer(folder), stop_ids, sharing)
    assert isinstance(engine, ExternalEngine)
    return (engine, sharing) if with_sharing else engine


def requests(temperature: float, step: int = 0, num_samples: int = 3) -> list[GenerationRequest]:
    """Seeds of 63 bits, as those of a run are."""
    return [
        GenerationRequest(
            i, prompt, num_samples, [2**62 + 1000 * step + 10 * i + j for j in range(num_samples)], temperature
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def check_samples(samples, model, temperature: float, version: int) -> None:
    """Against the model's own forward pass: tokens where greedy, log-probs always."""
    for sample in samples:
        prompt, response = PROMPTS[sample.request_id], sample.token_ids.tolist()
        log_probs, best = reference_log_probs(model, prompt, response, temperature)
        if temperature == 0:
            assert response == best
        assert (log_probs - sample.log_probs.double()).abs().max() <= TOLERANCE
        assert sample.policy_version == version
        ended = FinishReason.stop if response[-1] == 2 else FinishReason.length
        assert sample.finish_reason == ended and (2 not in response[:-1])
        assert ended == FinishReason.stop or len(response) == 24


def names(samples) -> dict[tuple[int, int], list[int]]:
    return {(s.request_id, s.sample_index): s.token_ids.tolist() for s in samples}


def follow_updates(engine: ExternalEngine, model, steps: int) -> None:
    """The weights move, the engine follows: nothing of the old weights or of keys made with them is left."""
    params = SamplingParams(max_tokens=24)
    for version in range(steps + 1):
        if version:
            move(model, seed=version)
            engine.update_weights(model, version)
        for temperature in (0.0, 0.7):
            samples = list(engine.generate(requests(temperature, version), params))
            assert len(samples) == 9
            check_samples(samples, model, temperature, version)
        drawn = names(samples)
        assert drawn == names(engine.generate(requests(0.7, version), params))  # by seed
        assert len({tuple(drawn[2, j]) for j in range(3)}) > 1  # seeds differ, samples do


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
def test_child_follows_five_updates_and_deaths(tmp_path, kind, tied):
    """One child through its life. Key/value space for two sequences only: the others wait."""
    folder = write_vllm_folder(tmp_path, kind, tied=tied)
    model = plain_model(folder)
    engine = make(folder, model, "rollout.kv_budget_tokens=256")
    steps = 5 if tied else 2
    try:
        follow_updates(engine, model, steps)
        assert engine.ready().kv_tokens < 9 * (70 + 24)

        wanted = names(engine.generate(requests(0.7, 7, 8), SamplingParams(max_tokens=24)))
        iterator = engine.generate(requests(0.7, 7, 8), SamplingParams(max_tokens=24))
        seen = [next(iterator)]
        os.kill(engine.link.process.pid, signal.SIGKILL)
        seen += list(iterator)
        assert names(seen) == wanted and len(seen) == 24 and engine.health().restarts == 1
        check_samples(seen, model, 0.7, steps)
        if kind == "llama":
            sleep_and_abort(engine, model)
    finally:
        engine.close()


def sleep_and_abort(engine: ExternalEngine, model) -> None:
    engine.sleep(2)
    engine.wake(("weights",))
    move(model, seed=50)
    engine.update_weights(model, 6)
    engine.wake(("kv",))
    check_samples(engine.generate(requests(0.0), SamplingParams(max_tokens=24)), model, 0.0, 6)
    iterator = engine.generate(requests(0.7, 9, 8), SamplingParams(max_tokens=24, ignore_eos=True))
    first = next(iterator)
    engine.abort()
    rest = list(iterator)
    aborted = [s for s in rest if s.finish_reason == FinishReason.abort]
    assert len(rest) == 23 and aborted
    for sample in [first, *aborted]:
        if sample.token_ids.numel():
            response = sample.token_ids.tolist()
            log_probs, _ = reference_log_probs(model, PROMPTS[sample.request_id], response, 0.7)
            assert (log_probs - sample.log_probs.double()).abs().max() <= TOLERANCE
    check_samples(engine.generate(requests(0.0), SamplingParams(max_tokens=24)), model, 0.0, 6)


def test_refusals(tmp_path):
    """Weights of another model are refused before the first byte, and the engine serves its own afterwards."""
    folder = write_vllm_folder(tmp_path / "a", "llama", tied=False)
    other = plain_model(write_vllm_folder(tmp_path / "b", "qwen2", tied=False))
    model = plain_model(folder)
    engine = make(folder, other)
    try:
        with pytest.raises(EngineError, match=r"refused.*bias"):
            engine.update_weights(other, 1)
        assert engine.health().alive and engine.restarts == 0
        engine.update_weights(model, 2)
        check_samples(engine.generate(requests(0.0), SamplingParams(max_tokens=24)), model, 0.0, 2)
        with pytest.raises(EngineError, match="context"):
            engine.generate([GenerationRequest(0, LONG)], SamplingParams(max_tokens=60))
    finally:
        engine.close()


def program_environment() -> dict[str, str]:
    """With which the programs of this folder find this repository."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), str(HERE.parent / "models")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(script: str, *arguments: str, timeout: float = 280) -> str:
    """A program of this folder in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_in_process(tmp_path):
    """vLLM in the trainer's own process: the same samples, and the process as it was."""
    assert "in process: fine" in run("vllm_in_process.py", str(tmp_path))


@pytest.mark.parametrize("size", [1, 2])
def test_two_ranks(tmp_path, size):
    """Two ranks with an engine each, then with one engine over both, one of whose processes is killed."""
    assert "two ranks: fine" in run("vllm_two_ranks.py", str(tmp_path), str(size))


@pytest.mark.parametrize("placing", [[], ["rollout.devices=[1]"]], ids=["shared", "apart"])
def test_training_run(tmp_path, placing):
    """A run with vLLM: its log-probs are the trainer's, at every step; also with an engine that never sleeps."""
    folder = write_vllm_folder(tmp_path / "model", "llama", tied=True)
    overrides = [*short_run(folder, tmp_path / "runs"), "rollout.engine=vllm", "optim.total_steps=5", *placing]
    result = run_training(load_config([], overrides))
    lines = [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 5
    assert all(line["mismatch/max"] <= TOLERANCE for line in lines)
    assert [line["rollout/policy_version"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["rollout/engine_restarts"] == 0 for line in lines)


def test_bad_settings_are_named(tmp_path):
    folder = write_vllm_folder(tmp_path, "llama", tied=True)
    with pytest.raises(ConfigError, match=r"max_response_tokens = 256 leaves no place for a prompt"):
        make(folder, plain_model(folder), "rollout.max_response_tokens=256")
    engine = make(folder, plain_model(folder), "rollout.vllm_options={no_such_option: 1}")
    with pytest.raises(EngineError, match=r"rollout.vllm_options: vLLM .* has no such option"):
        engine.ready()
    engine.close()
