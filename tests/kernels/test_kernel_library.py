"""Every op as a torch citizen: opcheck, fake tensors, torch.compile through the public functions, the bare import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastrl.kernels as K

REPOSITORY = Path(__file__).parents[2]
T, S = 11, 3
INFINITY = float("inf")


def tokens(seed, grad=False, dtype=torch.float32):
    return torch.randn(T, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


def common():
    return torch.tensor([0, 4, 4, 11]), torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1])


def op_cases():
    """op name -> arguments that reach every output."""
    cu, mask = common()
    scale, ids = torch.rand(S), torch.tensor([1, 1, 2])
    boot = torch.randn(S)
    sample_ids = torch.tensor([1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4])
    policy = (tokens(1, True), tokens(2), tokens(3), mask, tokens(4), None, cu, 0.2, 0.2, 3.0, INFINITY)
    value = (tokens(1, True), tokens(2), tokens(3), mask, None, scale, cu, 0.5, INFINITY)
    labels = torch.tensor([0, 4, -100, 2, 1, 3, 0, 4, 4, 2, 1])
    logits, hidden, weight, bias = torch.randn(T, 5), torch.randn(T, 3), torch.randn(5, 3), torch.randn(5)
    warmth, saved = torch.rand(T) + 0.5, (tokens(4), tokens(5), tokens(6))
    head = (hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels, warmth)
    numbers = (1.0, 0.9, 3.0, -100)
    return {
        "log_prob": (logits.clone().requires_grad_(), labels, warmth, 1.0, True, True, -100),
        "log_prob/plain": (logits.bfloat16().requires_grad_(), labels, None, 0.7, False, False, -100),
        "log_prob_backward": (tokens(1), tokens(2), logits, labels, warmth, 1.0, *saved, -100),
        "linear_log_prob": (*head, *numbers, True, True, 4, torch.float32),
        "linear_log_prob_backward": (
            tokens(1),
            None,
            *(x.detach() for x in head),
            *numbers,
            *saved,
            True,
            True,
            True,
            4,
            torch.float32,
        ),
        "gae": (tokens(1), tokens(2), mask, boot, torch.rand(S), cu, 0.9, 0.0),
        "discounted_returns": (tokens(1), mask, cu, 0.9),
        "group_normalize": (tokens(1), sample_ids, mask, True, False, 1, 1e-6),
        "whiten": (tokens(1), mask, None, None, 1, 1e-8),
        "masked_stats": (tokens(1), mask, cu, True, 1),
        "clipped_policy_loss": (*policy, True, True),
        "clipped_policy_loss/sum": (*policy, False, True),
        "clipped_value_loss": (*value, True, True),
        "clipped_value_loss/sum": (*value, False, True),
        "kl_divergence": (tokens(1, True), tokens(2), "k3", "k2"),
        "kl_divergence_backward": (tokens(3), tokens(1), tokens(2), "k3"),
        "sequence_lengths": (tokens(1), mask, cu),
        "aggregation_scale": (torch.tensor([3, 0, 8]), ids, None, "prompt-mean", 1.0, torch.float32),
        "aggregate": (tokens(1, True), mask, tokens(2), scale, cu),
        "aggregate_backward": (torch.tensor(2.0), tokens(1), mask, tokens(2), scale, cu),
        "mismatch_sums": (tokens(1), tokens(2), mask, cu),
        "pack_weights": ([tokens(1), tokens(2, dtype=torch.bfloat16)], torch.zeros(30)),
        "chain": (tokens(1), tokens(2), None),
    }


def load_all_ops():
    for name in K.__all__:
        getattr(K, name)


@pytest.mark.parametrize("name", list(op_cases()))
def test_opcheck(name):
    load_all_ops()
    op = getattr(torch.ops.fastrl, name.split("/")[0]).default
    result = torch.library.opcheck(op, op_cases()[name])
    assert set(result.values()) == {"SUCCESS"}


def test_every_op_is_checked():
    load_all_ops()
    defined = {name.removeprefix("fastrl::") for name in torch._C._dispatch_get_all_op_names() if "fastrl::" in name}
    assert defined == {name.split("/")[0] for name in op_cases()}


def public_calls():
    """name -> function of float tensors, through the public API, ending in a tensor."""
    cu, mask = common()
    ids = torch.tensor([1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4])
    agg = {"loss_agg_mode": "seq-mean-token-mean", "cu_seqlens": cu}
    return {
        "gae": lambda x, y: K.gae(x, y, mask, gamma=0.9, gae_lambda=0.8, cu_seqlens=cu)[0],
        "discounted_returns": lambda x, y: K.discounted_returns(x, mask, gamma=0.9, cu_seqlens=cu),
        "group_normalize": lambda x, y: K.group_normalize(x, ids),
        "whiten": lambda x, y: K.whiten(x, mask),
        "masked_stats": lambda x, y: K.masked_stats(x, mask, cu_seqlens=cu).var,
        "clipped_policy_loss": lambda x, y: K.clipped_policy_loss(x, y, y, mask, **agg).loss,
        "clipped_policy_loss/none": lambda x, y: K.clipped_policy_loss(x, y, y, mask, reduction="none").loss,
        "clipped_value_loss": lambda x, y: K.clipped_value_loss(x, y, y, mask, **agg).loss,
        "kl_divergence": lambda x, y: K.kl_divergence(x, y, kind="k3+"),
        "aggregate": lambda x, y: K.aggregate(x, mask, **agg),
        "mismatch_stats": lambda x, y: K.mismatch_stats(x, y, mask, cu_seqlens=cu).chi2,
    }


@pytest.mark.parametrize("name", list(public_calls()))
def test_compiles_as_one_graph_with_the_same_gradient(name):
    function = public_calls()[name]
    results = []
    torch._dynamo.reset()
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        x = tokens(1, True)
        out = run(x, tokens(2))
        if out.requires_grad:
            out.sum().backward()
        results.append((out.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    if results[0][1] is not None:
        torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.slow
def test_compiles_with_inductor():
    cu, mask = common()

    def step(lp, old, adv):
        token = K.clipped_policy_loss(lp * 2, old, adv, reduction="none").loss + 0.1 * K.kl_divergence(lp, old)
        return K.aggregate(token, mask, loss_agg_mode="seq-mean-token-sum", cu_seqlens=cu)

    x, y = tokens(1, True), tokens(1, True)
    step(x, tokens(2), tokens(3)).backward()
    torch.compile(step, fullgraph=True)(y, tokens(2), tokens(3)).backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_pass_through(device):
    # shapes and dtypes without data, for a GPU that is not there too
    with FakeTensorMode(allow_non_fake_inputs=False):
        cu = torch.empty(4, dtype=torch.int64, device=device)
        # autograd of a CPU build of torch crashes on fake CUDA tensors, for any custom function
        grad = device == "cpu" or torch.cuda.is_available()
        x, y = torch.empty(T, device=device, requires_grad=grad), torch.empty(T, device=device, dtype=torch.bfloat16)
        mask = torch.empty(T, dtype=torch.bool, device=device)
        assert K.gae(x, y, mask, gamma=1.0, gae_lambda=1.0, cu_seqlens=cu)[1].shape == (T,)
        loss = K.clipped_policy_loss(x, y, y, mask, loss_agg_mode="seq-mean-token-mean", cu_seqlens=cu).loss
        assert loss.shape == () and loss.device.type == device
        if grad:
            loss.backward()
            assert x.grad.shape == (T,) and x.grad.device.type == device
        assert K.masked_stats(x, mask, cu_seqlens=cu).count.shape == (3,)
        assert K.mismatch_stats(x, y, mask).ess.shape == ()
        assert K.whiten(y).dtype == torch.float32
        labels = torch.empty(T, dtype=torch.int64, device=device)
        logits = torch.empty((T, 5), device=device, dtype=torch.bfloat16)
        rows = K.log_prob(logits, labels, want_entropy=True)
        assert rows.entropy.shape == (T,) and rows.log_prob.dtype == torch.float32
        rows = K.linear_log_prob(torch.empty((T, 3), device=device), torch.empty((5, 3), device=device), labels)
        assert rows.log_prob.shape == (T,) and rows.log_prob.device.type == device
        assert K.discounted_returns(x, gamma=1.0, cu_seqlens=cu).shape == (T,)
        assert K.clipped_value_loss(x, y, y, mask).loss.shape == () and K.kl_divergence(x, y).shape == (T,)
        assert K.aggregate(x, mask, loss_agg_mode="seq-mean-token-mean", cu_seqlens=cu).shape == ()
        assert K.group_normalize(x, torch.empty(T, dtype=torch.int32, device=device)).device.type == device


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | environment,
    ).stdout


def test_the_import_pulls_in_torch_and_triton_only():
    code = """
import sys, time, torch, triton
before, start = set(sys.modules), time.thread_time()
import fastrl.kernels as K
seconds = time.thread_time() - start
for name in K.__all__:
    getattr(K, name)
roots = {name.split('.')[0] for name in set(sys.modules) - before}
print(sorted(roots - set(sys.stdlib_module_names) - {'fastrl', 'torch', 'triton'}), seconds)
inside = {n for n in sys.modules if n.startswith('fastrl.')}
print(sorted(n for n in inside if not n.startswith('fastrl.kernels')))
"""
    seconds = []
    while len(seconds) < 3 and min(seconds, default=1.0) > 0.05:  # a busy machine may need a second try
        first, second = run_python(code).splitlines()
        roots, taken = first.rsplit(" ", 1)
        assert roots == "[]"
        assert second == "[]"
        seconds.append(float(taken))
    assert min(seconds) < 0.05, f"importing fastrl.kernels took {seconds} s beyond torch and triton"


def test_names_are_functions_whatever_is_imported_first():
    code = """
import fastrl.kernels.gae.reference, fastrl.kernels.whiten
import fastrl.kernels as K
from fastrl.kernels import gae
print(callable(K.whiten), callable(gae), len(set(K.__all__) - set(dir(K))))
"""
    assert run_python(code).split() == ["True", "True", "0"]


def test_a_wrong_choice_of_implementation_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("FASTRL_KERNELS", "fast")
    with pytest.raises(ValueError, match="FASTRL_KERNELS = 'fast': use one of auto, reference, triton"):
        K.whiten(torch.ones(3))
    monkeypatch.setenv("FASTRL_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="'triton' on CPU tensors needs TRITON_INTERPRET=1"):
        K.whiten(torch.ones(3))
    monkeypatch.setenv("FASTRL_KERNELS", "reference")
    assert K.whiten(torch.ones(3)).tolist() == [0, 0, 0]
