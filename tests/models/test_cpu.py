"""oneDNN linear layers compute what nn.Linear computes; the allocator keeps its heap."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fastrl.models.cpu import OneDnnLinear, keep_heap, use_onednn


def converted(layer):
    other = nn.Sequential(copy.deepcopy(layer))
    if not use_onednn(other):
        pytest.skip("this torch has no oneDNN inner product")
    return other[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 33), (1, 5, 33), (2, 3, 4, 33), (0, 33)])
def test_values_and_gradients(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(33, 21, bias=bias)
    x = torch.randn(shape).transpose(0, -2) if len(shape) > 2 else torch.randn(shape)  # strided rows too
    results = []
    for module in (layer, converted(layer)):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        gradients = torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])
        results.append([out.detach(), *gradients])
    exact = [t.double() for t in results[0]]
    for ours, reference in zip(results[1], exact, strict=True):
        assert ours.shape == reference.shape
        assert float((ours - reference).norm()) <= 1e-6 * float(reference.norm())
    assert type(converted(layer)) is OneDnnLinear
    assert isinstance(converted(layer), nn.Linear)


def test_frozen_weights_and_no_grad():
    layer = converted(nn.Linear(8, 4))
    layer.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(3, 8), atol=1e-6)
    assert layer.weight.grad is None
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_other_types_go_the_usual_way():
    layer = converted(nn.Linear(8, 4))
    x = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert torch.equal(layer.double()(x.double()), nn.functional.linear(x.double(), layer.weight, layer.bias))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_heap_is_kept():
    """After a warm-up blocks of 64 MiB cost no page faults (in a process of its own: the setting stays)."""
    code = (
        "import resource, torch\nfrom fastrl.models.cpu import keep_heap\nprint(keep_heap())\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(30): torch.ones(2**24)\nbefore = faults()\nfor _ in range(10): torch.ones(2**24)\n"
        "print(faults() - before)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    taken, faults = run.stdout.split()
    if taken != "True":
        pytest.skip("not glibc")
    assert int(faults) < 1000, "10 blocks of 16384 pages"


def test_keep_heap_is_safe_to_call_twice():
    assert keep_heap() == keep_heap()
