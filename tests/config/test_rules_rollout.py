"""What the rules say about engines."""

from __future__ import annotations

import importlib.util

import pytest

from fastrl.config import rules_rollout
from fastrl.config.load import load_config
from fastrl.errors import ConfigError
from fastrl.trainer import engine_choice
from fastrl.trainer.engine_choice import choose_engine
from fastrl.trainer.roles import Role, roles_of

BASE = ["model.path=builtin:tiny", "data.train=task:arithmetic", "optim.total_steps=1", "reward.functions=[exact]"]


@pytest.fixture
def installed(monkeypatch):
    """Pretends that a version of vLLM is installed (None: none)."""

    def pretend(version):
        found = None if version is None else "found"
        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: found if name == "vllm" else real(name, *a))
        monkeypatch.setattr(rules_rollout, "vllm_version", lambda: version)

    return pretend


def load(*more):
    return load_config([], [*BASE, *more])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rollout.engine=vllm"], "vLLM is not installed"),
        (["rollout.engine=vllm", "run.dtype=float64"], "vLLM has no such type"),
        (["rollout.vllm_options={dtype: half}"], "dtype is set by run.dtype"),
        (["rollout.vllm_options={logprobs_mode: raw_logprobs}"], "logprobs_mode is fixed"),
        (["rollout.vllm_in_process=true", "rollout.tensor_parallel_size=2"], "needs a child process per rank"),
        (["rollout.vllm_in_process=true", "rollout.devices=[1]"], "GPUs of its own"),
        (["rollout.weight_transport=cuda_ipc", "rollout.devices=[1]"], "puts it on another: use auto"),
        (["rollout.engine=vllm", "rollout.weight_transport=in_process"], "reaches no other process"),
    ],
)
def test_refused(installed, more, message):
    installed(None)
    with pytest.raises(ConfigError, match=message):
        load(*more)


def test_warnings(installed):
    installed("0.31.2")
    (text,) = [w for w in load("rollout.engine=vllm").warnings if "0.31.2" in w]
    assert "tested with 0.32.x" in text
    installed("0.32.0")
    assert not [w for w in load("rollout.engine=vllm").warnings if "vLLM" in w]
    assert [w for w in load("rollout.engine=native", "rollout.sleep_level=1").warnings if "no effect" in w]


def test_auto_takes_what_is_there(installed, tmp_path):
    installed(None)
    assert choose_engine(load().config) == engine_choice.EngineChoice("native", "vLLM is not installed")
    installed("0.32.0")
    assert choose_engine(load().config).name == "native"  # the packaged model
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    other = load(f"model.path={tmp_path}").config
    assert choose_engine(other).name == "vllm" and {Role.Actor, Role.Rollout} <= roles_of(other)
    assert choose_engine(load(f"model.path={tmp_path}", "run.dtype=float64").config).name == "native"
    assert choose_engine(load("rollout.engine=vllm").config).name == "vllm"


def test_the_embedded_engine_may_be_asked_for_common_weights(installed):
    """It has them anyway, in float64 too: said, not refused."""
    installed(None)
    (text,) = load("rollout.engine=native", "rollout.zero_copy=true", "run.dtype=float64").warnings
    assert "rollout.zero_copy has no effect" in text
