"""Engines on GPUs of their own: who gets which, what is refused, and that they are never put to sleep."""

import os
from pathlib import Path

import pytest
import torch
from scripted_backend import VOCABULARY
from test_choreography import choreography
from test_external_engine import GREEN, HERE, REQUESTS, collect, expected, policy
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.errors import ConfigError
from fastrl.models.load import load_model
from fastrl.rollout.backend import BackendSettings
from fastrl.rollout.external import ExternalEngine
from fastrl.trainer import engine_links, engines
from fastrl.trainer.engine_devices import check_devices, engine_device, engine_environment, engines_per_device
from fastrl.trainer.engine_memory import engine_fraction


def test_every_rank_gets_its_gpu_in_turn():
    """Ranks 0 to 3 train on GPUs 0 to 3; engines on 4, 5, 4, 5, two on each."""
    assert [engine_device([4, 5], rank, rank) for rank in range(4)] == [4, 5, 4, 5]
    assert [engine_device(None, rank, rank) for rank in range(4)] == [0, 1, 2, 3]
    assert [engines_per_device([4, 5], n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert engines_per_device(None, 4) == 1


def test_the_environment_of_the_engine_process():
    """Numbers are of what the trainer sees: with CUDA_VISIBLE_DEVICES=2,3,6,7 its GPU 3 is the machine's 7."""
    assert engine_environment(3, 1, "2,3,6,7") == {"CUDA_VISIBLE_DEVICES": "7"}
    assert engine_environment(1, 1, "GPU-aa, GPU-bb") == {"CUDA_VISIBLE_DEVICES": "GPU-bb"}
    assert engine_environment(5, 1, None) == engine_environment(5, 1, "") == {"CUDA_VISIBLE_DEVICES": "5"}
    assert engine_environment(3, 2, "2,3,6,7") == {"LOCAL_RANK": "3"}  # one engine over two: all of them see all


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([8], "there is no GPU 8, this process sees 8"),
        ([-1], "there is no GPU -1"),
        ([4, 1], "GPU 1 trains, as do all below 4"),
        ([4, 4], "rollout.tensor_parallel_size = 2 needs as many different GPUs"),
    ],
)
def test_devices_that_cannot_be_are_refused(devices, text):
    with pytest.raises(ConfigError, match=text):
        check_devices(devices, local_size=4, present=8, tensor_parallel_size=2)
    check_devices([4, 5, 6, 7], local_size=4, present=8, tensor_parallel_size=2)


def test_an_engine_apart_never_sleeps():
    memory, calls = choreography(None)
    memory.movable = ()
    memory.train()
    memory.generate("model", 1, changed=True)
    memory.train()
    memory.generate("model", 1, changed=False)
    assert calls == ["update model 1"]


def test_a_process_is_started_on_the_device_and_follows(tmp_path, monkeypatch):
    """As on a machine of 2 GPUs, the trainer on GPU 0: what the scripted engine process sees and is told."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(engine_links, "CHILD", "scripted_backend")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    path = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.chdir(HERE)  # the child finds the scripted backend beside it
    config = load_config(
        [], ["model.path=builtin:tiny", "rollout.engine=vllm", "rollout.devices=[1]"], cross_check=False
    )
    model = policy()
    settings = BackendSettings(model="tiny", device="cuda", options={"calls": str(tmp_path / "calls")})
    link = engine_links.make_link(config.config, model, settings, None)
    assert link.sender.sender.requested == "shared_memory"
    engine = ExternalEngine(link, model, vocabulary_size=VOCABULARY, context=64, stop_token_ids=[49])
    memory = engines.make_choreography(config.config, engine, Trained(model), None, torch.device("cuda"))
    try:
        assert collect(engine.generate(REQUESTS, GREEN)) == expected(9, 0)
        seen = Path(f"/proc/{link.process.pid}/environ").read_text().split("\0")
        assert "CUDA_VISIBLE_DEVICES=5" in seen
        for version in (1, 2):
            memory.train()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            memory.generate(model, version, changed=True)
            assert collect(engine.generate(REQUESTS, GREEN)) == expected(9 * (version + 1), version)
    finally:
        engine.close()
    assert (tmp_path / "calls").read_text() == ""


class Trained:
    """What the choreography asks of a policy."""

    def __init__(self, model):
        self.model = model
        self.optimizer = self
        self.torch_optimizer = torch.optim.AdamW(model.parameters())


def test_the_memory_of_a_device_of_its_own(tmp_path, monkeypatch):
    """80 GiB less 2 for contexts, at most 0.92 of it; two engines on one GPU take half each. No sleep mode."""
    folder = write_tiny_folder(tmp_path)
    model = load_model(folder)
    monkeypatch.setattr("fastrl.trainer.engine_memory.device_bytes", lambda device: 80 << 30)
    for ranks, wanted in ((1, 0.92), (2, 0.46)):
        monkeypatch.setattr("fastrl.trainer.engine_memory.local_seat", lambda n=ranks: (0, n))
        config = load_config([], [*short_run(folder, tmp_path), "rollout.devices=[3]"]).config
        assert engine_fraction(config, model, torch.device("cuda")) == wanted
    assert not engines.backend_settings(config, model).sleep_mode
