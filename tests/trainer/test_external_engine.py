"""The engine process and its protocol, with a backend whose every token is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from scripted_backend import VOCABULARY

from fastrl.data.batch import FinishReason
from fastrl.errors import EngineError
from fastrl.rollout.backend import BackendSettings, Draw
from fastrl.rollout.engine import Engine, GenerationRequest, SamplingParams
from fastrl.rollout.external import ExternalEngine
from fastrl.rollout.process_link import ProcessLink, child_environment, draws_to_json
from fastrl.trainer.engine_links import BucketSender

HERE = Path(__file__).resolve().parent
GREEN = SamplingParams(max_tokens=6)


def policy(value: float = 1.0) -> torch.nn.Linear:
    """Six weights and three biases of `value` each: they sum to 9 x value."""
    model = torch.nn.Linear(2, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def start(model: torch.nn.Module, *, timeout_s: float = 60.0, name: str = "tiny", **options) -> ExternalEngine:
    settings = BackendSettings(model=name, options=options)
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    link = ProcessLink(
        "scripted_backend",
        settings,
        BucketSender(model, torch.float32, timeout_s),
        timeout_s=timeout_s,
        environment={"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), path])},
    )
    return ExternalEngine(link, model, vocabulary_size=VOCABULARY, context=64, stop_token_ids=[49])


def tokens_by_hand(total: int, prompt: list[int], seed: int, limit: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit and (not tokens or tokens[-1] != 49):
        tokens.append((total + sum(prompt) + seed + len(tokens)) % 50)
    return tokens


def collect(samples) -> dict[tuple[int, int], tuple[list[int], str, int]]:
    return {
        (s.request_id, s.sample_index): (s.token_ids.tolist(), FinishReason(s.finish_reason).name, s.policy_version)
        for s in samples
    }


@pytest.fixture
def engine(tmp_path):
    made = start(policy(), step_s=0.002, die_at=str(tmp_path / "die"), die_in_update=str(tmp_path / "update"))
    yield made
    made.close()


REQUESTS = [GenerationRequest(7, [1, 2], 3, [0, 1, 2]), GenerationRequest(9, [5], 2, [40, 30], max_tokens=3)]


def expected(total: int, version: int) -> dict[tuple[int, int], tuple[list[int], str, int]]:
    wanted = {}
    for request in REQUESTS:
        for index, seed in enumerate(request.seeds):
            tokens = tokens_by_hand(total, list(request.prompt_ids), seed, request.max_tokens or 6)
            wanted[request.request_id, index] = (tokens, "stop" if tokens[-1] == 49 else "length", version)
    return wanted


def test_samples_updates_and_death(engine, tmp_path):
    """One engine through its life: first weights by itself, an update, a kill in mid-generation, one in mid-update."""
    assert isinstance(engine, Engine)
    assert collect(engine.generate(REQUESTS, GREEN)) == expected(9, 0)
    info = engine.ready()
    assert (info.name, info.context, info.kv_tokens, info.warnings) == ("scripted 1", 64, 1000, ("a warning",))
    first = next(iter(engine.generate(REQUESTS, GREEN)))
    assert first.log_probs.tolist() == [-t / 8 for t in range(first.token_ids.numel())]

    engine.update_weights(policy_of(engine, 2.0), 5)
    assert collect(engine.generate(REQUESTS, GREEN)) == expected(18, 5)

    seen, child = [], engine.link.process.pid
    for sample in engine.generate(REQUESTS, GREEN):
        seen.append(sample)
        if len(seen) == 1:
            (tmp_path / "die").touch()
    assert collect(seen) == expected(18, 5) and len(seen) == 5
    assert engine.restarts == engine.health().restarts == 1 and engine.link.process.pid != child
    assert engine.health().alive

    (tmp_path / "update").touch()
    engine.update_weights(policy_of(engine, 3.0), 6)
    assert engine.restarts == 2 and collect(engine.generate(REQUESTS, GREEN)) == expected(27, 6)


def policy_of(engine: ExternalEngine, value: float) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(value)
    return engine.model


def test_second_death_stops_the_run(tmp_path):
    engine = start(policy(), step_s=0.1, die_at=str(tmp_path / "die"))
    iterator = engine.generate(REQUESTS, GREEN)
    next(iterator)
    stop = threading.Event()

    def keep_killing():
        while not stop.wait(0.01):
            (tmp_path / "die").touch()

    killer = threading.Thread(target=keep_killing)
    killer.start()
    try:
        with pytest.raises(EngineError, match="died again after a restart: the engine process was killed by SIGKILL"):
            list(iterator)
    finally:
        stop.set()
        killer.join()
    assert not engine.health().alive
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.update_weights(engine.model, 1)


def test_abort_close_early_and_health(tmp_path):
    engine = start(policy(), step_s=0.02)
    many = [GenerationRequest(i, [i], 1, [0]) for i in range(12)]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    iterator = engine.generate(many, params)
    timer = threading.Timer(0.0, lambda: None)

    def stop_when_running():
        while not engine.health().num_running:
            time.sleep(0.005)
        health = engine.health()
        assert (health.num_waiting, health.kv_tokens_used) == (8, 120)
        engine.abort()

    timer = threading.Thread(target=stop_when_running)
    timer.start()
    samples = list(iterator)
    timer.join()
    assert len(samples) == 12 and {FinishReason(s.finish_reason).name for s in samples} == {"abort"}
    for sample in samples:
        wanted = tokens_by_hand(9, [sample.request_id], 0, 50)
        assert sample.token_ids.tolist() == [t % 50 for t in wanted[: sample.token_ids.numel()]]

    iterator = engine.generate(REQUESTS, GREEN)
    next(iterator)
    with pytest.raises(EngineError, match="update_weights while samples"):
        engine.update_weights(engine.model, 3)
    iterator.close()  # the engine is idle again, nothing of the old call comes up in the next
    assert collect(engine.generate(REQUESTS, GREEN)) == expected(9, 0)
    engine.close()
    engine.close()


def test_memory_calls_reach_the_backend(tmp_path):
    engine = start(policy(), calls=str(tmp_path / "calls"))
    engine.sleep(2)
    with pytest.raises(EngineError, match="sleeping engine"):
        engine.generate(REQUESTS, GREEN)
    with pytest.raises(EngineError, match="sleeping weights"):
        engine.update_weights(engine.model, 1)
    engine.wake(("weights",))
    engine.update_weights(engine.model, 1)
    assert engine.health().sleeping
    engine.wake(("weights", "kv"))  # weights are awake already
    engine.reset_prefix_cache()
    assert not engine.health().sleeping and collect(engine.generate(REQUESTS, GREEN)) == expected(9, 1)
    engine.close()
    assert (tmp_path / "calls").read_text().splitlines() == ["sleep 2", "wake weights", "wake kv", "reset"]


def test_silent_engine_is_killed(tmp_path):
    engine = start(policy(), timeout_s=20.0, hang_at=str(tmp_path / "hang"))
    list(engine.generate(REQUESTS, GREEN))
    engine.link.timeout_s = 1.0
    (tmp_path / "hang").touch()
    engine.link.timeout_s, long = 1.0, 20.0
    restart = engine.link.restart

    def patient_restart():
        engine.link.timeout_s = long
        restart()

    engine.link.restart = patient_restart
    assert collect(engine.generate(REQUESTS, GREEN)) == expected(9, 0) and engine.restarts == 1
    engine.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [("unknown", "the scripted backend does not know it"), ("crash", "was killed by SIGSEGV while it started")],
)
def test_an_engine_that_cannot_start(name, message):
    engine = start(policy(), name=name)
    with pytest.raises(EngineError, match=message):
        list(engine.generate(REQUESTS, GREEN))
    engine.close()


def test_other_shapes_are_refused_before_the_first_byte():
    engine = start(policy(), shape=[4, 2])
    with pytest.raises(EngineError, match=r"weight.*\[3, 2\]|weight.*\(3, 2\)"):
        list(engine.generate(REQUESTS, GREEN))
    assert engine.restarts == 0 and engine.health().alive
    engine.close()


def test_bad_requests():
    engine = start(policy(), step_s=0.0)
    with pytest.raises(EngineError, match=r"exceed the engine.s context of 64 tokens: lower rollout"):
        engine.generate([GenerationRequest(0, [1] * 60)], GREEN)
    with pytest.raises(EngineError, match="empty prompt"):
        engine.generate([GenerationRequest(0, [])], GREEN)
    assert list(engine.generate([], GREEN)) == []
    engine.close()


TRAINER = """
import sys, time, torch
sys.path[:0] = [{here!r}]
from test_external_engine import *
engine = start(policy(), step_s=0.05)
iterator = engine.generate([GenerationRequest(0, [1], 1, [0])] , SamplingParams(max_tokens=40, ignore_eos=True))
import threading
threading.Thread(target=lambda: list(iterator), daemon=True).start()
while not engine.health().num_running:
    time.sleep(0.01)
print(engine.link.process.pid, engine.link.sender.sender.address, flush=True)
time.sleep(60)
"""


def test_no_orphan_when_the_trainer_is_killed():
    code = TRAINER.format(here=str(HERE))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    words = trainer.stdout.readline().split()
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    pid, address = int(words[0]), Path(words[1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (running(pid) or address.parent.exists()):
        time.sleep(0.05)
    assert not running(pid) and not address.parent.exists()


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_environment_of_the_child(monkeypatch):
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "KEPT": "yes",
    }.items():
        monkeypatch.setenv(name, value)
    made = child_environment(BackendSettings(model="/"), {"CUDA_VISIBLE_DEVICES": "2", "KEPT_NOT": None})
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "VLLM_CPU_KVCACHE_SPACE"} & set(made)
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64" and "PYTORCH_ALLOC_CONF" not in made
    assert made["KEPT"] == "yes" and made["CUDA_VISIBLE_DEVICES"] == "2" and made["HF_HUB_OFFLINE"] == "1"


def test_distinct_prompts_travel_once():
    draws = [Draw(0, (1, 2), 5, 1.0, 3), Draw(1, [1, 2], 6, 1.0, 3), Draw(2, [4], 7, 0.0, 2)]
    wanted = {"prompts": [[1, 2], [4]], "draws": [[0, 0, 5, 1.0, 3], [1, 0, 6, 1.0, 3], [2, 1, 7, 0.0, 2]]}
    assert draws_to_json(draws) == wanted


def test_processes_of_one_engine_draw_the_same_samples_and_keep_their_own():
    """Two ranks of a tensor-parallel engine: both links get both ranks' samples in rank order."""

    class Recorder:
        def __init__(self):
            self.keys = []

        def start(self): ...

        def update(self, model, version): ...

        def generate(self, draws, params):
            from fastrl.rollout.backend import Drawn

            self.keys = [(d.key, list(d.prompt_ids), d.seed) for d in draws]
            return iter([Drawn(d.key, [d.seed], [0.0], "length") for d in reversed(draws)])

    asked = {0: [GenerationRequest(4, [1], 2, [10, 11])], 1: [GenerationRequest(4, [2], 1, [20])]}
    plain = {0: [([1], 10, 1.0, 6), ([1], 11, 1.0, 6)], 1: [([2], 20, 1.0, 6)]}
    records = []
    for rank in (0, 1):
        link = Recorder()
        engine = ExternalEngine(
            link, policy(), vocabulary_size=50, gather=lambda mine: [plain[0], plain[1]], engine_rank=rank
        )
        own = {(s.request_id, s.sample_index): s.token_ids.item() for s in engine.generate(asked[rank], GREEN)}
        assert own == ({(4, 0): 10, (4, 1): 11} if rank == 0 else {(4, 0): 20})
        records.append(link.keys)
    assert records[0] == records[1] == [(0, [1], 10), (1, [1], 11), (2, [2], 20)]
