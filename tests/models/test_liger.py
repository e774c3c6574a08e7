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


SAME = """
import sys
sys.path.insert(0, {tests!r})
import numpy
import torch
import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.runtime import interpreter
convert = interpreter._implicit_cvt
def with_floats(value):  # the interpreter hands Python floats to kernels as they are, compiled code as float32
    if isinstance(value, float):
        return tl.tensor(interpreter.TensorHandle(numpy.array([value], numpy.float32), tl.float32), tl.float32)
    return convert(value)
interpreter._implicit_cvt = with_floats
libdevice.rsqrt = tl.math.rsqrt  # the interpreter has no device library
from tiny_models import ragged_batch, tiny_model
from fastrl.data.packing import pack
from fastrl.models.forward import hidden_rows
from fastrl.models.liger import apply_liger
from fastrl.models.load import prepare_model

family = {family!r}
(micro,) = pack(ragged_batch([4, 3], [[3, 5], [2]]), max_tokens=100)
def rows(model):
    out = hidden_rows(model, micro)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
plain = rows(prepare_model(tiny_model(family, dtype=torch.float32)))
model = tiny_model(family, dtype=torch.float32)
replaced = apply_liger(model)
patched = rows(prepare_model(model))
assert "rms_norm" in replaced and "rope" in replaced, replaced
assert type(model.model.layers[0].input_layernorm).forward is not model.model.layers[0].input_layernorm.forward.__func__
for a, b in zip(plain, patched):
    assert (a - b).norm() <= 1e-5 * a.norm(), float((a - b).norm() / a.norm())
print("same")
"""


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_patched_model_computes_the_same(family):
    """Liger's kernels under Triton's interpreter, on the CPU in float32."""
    pytest.importorskip("liger_kernel")
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SAME.format(tests=tests, family=family)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr
