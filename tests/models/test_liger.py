"""When Liger's kernels are used, and that a patched model computes what the model computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastrl.errors import ModelError
from fastrl.models import liger
from fastrl.models.liger import TYPES, choose_liger, why_not_liger

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: name == "liger_kernel" or None)


def test_auto_takes_it_where_it_can_run(installed):
    assert all(choose_liger(kind, GPU, torch.bfloat16) for kind in TYPES)
    assert not choose_liger("llama", CPU, torch.bfloat16)
    assert not choose_liger("llama", GPU, torch.float32)
    assert not choose_liger("gpt2", GPU, torch.bfloat16)
    assert not choose_liger("llama", GPU, torch.bfloat16, "off")


def test_what_is_missing_is_named(installed, monkeypatch):
    with pytest.raises(ModelError, match=r"model.liger = on: Liger needs a GPU, this is cpu; or set model.liger=auto"):
        choose_liger("llama", CPU, torch.bfloat16, "on")
    with pytest.raises(ModelError, match=r"needs run.dtype = bfloat16, this is float32"):
        choose_liger("llama", GPU, torch.float32, "on")
    with pytest.raises(ModelError, match=r"does not cover model type gpt2 \(it does gemma, "):
        choose_liger("gpt2", GPU, torch.bfloat16, "on")
    with pytest.raises(ModelError, match=r"model.liger = yes: choose auto, on, off"):
        choose_liger("llama", GPU, torch.bfloat16, "yes")
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    assert why_not_liger("llama", GPU, torch.bfloat16) == "is not installed: pip install 'fastrl[liger]'"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_patched_model_computes_the_same(family):
    """Liger's kernels under Triton's interpreter on the CPU, forward and backward, in float32 and under bfloat16."""
    pytest.importorskip("liger_kernel")
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, str(here / "liger_child.py"), family],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr
    print(done.stdout)
