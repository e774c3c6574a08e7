"""Paths that only a CPU takes, against float64 loops: blocks, masks as factors, ops called without torch's dispatch."""

import itertools

import kernel_oracles as oracle
import numpy as np
import pytest
import torch
from kernel_cases import TRITON, close, cu, mask_of, normal, offsets_of, poisoned, seen
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl.kernels import aggregate, gae, group_normalize, kl_divergence, masked_stats, mismatch_stats, whiten

pytestmark = pytest.mark.skipif(TRITON, reason="paths of a CPU")

LENGTHS = [100, 0, 37, 256, 8, 300]
T = sum(LENGTHS)


@pytest.fixture(autouse=True, params=[64, 1 << 17], ids=["blocks of 64", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr("fastrl.kernels.cpu_blocks.BLOCK", request.param)


@pytest.fixture(params=["zeros", "garbage"])
def outside(request):
    """What stands where the mask is off: zeros, or NaN and Inf."""
    return (lambda x, mask: torch.from_numpy(x * mask).float()) if request.param == "zeros" else poisoned


@pytest.mark.parametrize("shift", [0.0, 9.0, -9.0])
@pytest.mark.parametrize("keep", [0.6, 1.0])
def test_whiten_and_stats(outside, shift, keep):
    mask = mask_of(T, 1, keep)
    x = outside(normal(T, 2) + shift, mask)
    m = torch.from_numpy(mask)
    close(whiten(x, m), oracle.whiten(seen(x), mask))
    close(whiten(x, m, mean=0.5, var=4.0), oracle.whiten(seen(x), mask, mean=0.5, var=4.0))
    got = masked_stats(x, m)
    for value, want in zip(got, oracle.stats(seen(x), mask), strict=True):
        close(value / T, want / T)
    # of the values themselves, to the bit, whatever their sign
    assert (got.min, got.max) == (x[m].min(), x[m].max())


def test_stats_of_values_of_one_sign_with_zeros():
    x, mask = torch.tensor([0.0, 3.0, 5.0, -7.0]), torch.tensor([1, 1, 1, 0])
    assert [v.item() for v in masked_stats(x, mask)[4:]] == [0, 5]
    assert [v.item() for v in masked_stats(-x, mask)[4:]] == [-5, 0]
    assert [v.item() for v in masked_stats(torch.zeros(4), mask)[4:]] == [0, 0]


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k3+"])
def test_kl_divergence(kind):
    new, old = normal(T, 3, 3.0), normal(T, 4, 3.0)
    new[:3], old[:3] = [-1e-4, 0.0, -50.0], [0.0, -1e-4, 0.0]
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.from_numpy(new).to(dtype), torch.from_numpy(old)
        b = b.float()
        x = seen(a) - seen(b)
        close(kl_divergence(a, b, kind=kind), [oracle.kl_token(v, kind.rstrip("+"))[0] for v in x])


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_mismatch(outside, spread):
    mask = mask_of(T, 5)
    old = -np.abs(normal(T, 6))
    new = np.minimum(old + normal(T, 7, spread), 0)
    new, old = outside(new, mask), outside(old, mask)
    got = mismatch_stats(new, old, torch.from_numpy(mask), cu_seqlens=cu(LENGTHS))
    want = oracle.mismatch(seen(new), seen(old), mask, offsets_of(LENGTHS))
    for name, value in want.items():
        size = max(1.0, abs(value))
        close(getattr(got, name) / size, value / size, factor=2)
    rows = [x[:700].reshape(7, 100) for x in (new, old, torch.from_numpy(mask))]
    want = oracle.mismatch(seen(new)[:700], seen(old)[:700], mask[:700], offsets_of([100] * 7))
    close(mismatch_stats(*rows).sequence_k1_max / 20, want["sequence_k1_max"] / 20)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_aggregate_and_its_gradient(outside, mode, weighted):
    mask = mask_of(T, 8)
    x, w = outside(normal(T, 9), mask), outside(np.abs(normal(T, 10)), mask)
    m = torch.from_numpy(mask)
    for lengths, shape, options in (
        (LENGTHS, (T,), {"cu_seqlens": cu(LENGTHS)}),
        ([T // 3] * 3, (3, T // 3), {}),
    ):
        total = sum(lengths)
        inside, offsets = mask[:total], offsets_of(lengths)
        counts = [int(inside[a:b].sum()) for a, b in itertools.pairwise(offsets)]
        scale = np.repeat(oracle.scale(mode, counts), lengths)
        factor = np.where(inside, scale * (seen(w)[:total] if weighted else 1.0), 0.0)
        losses = x[:total].reshape(shape).clone().requires_grad_()
        loss = aggregate(
            losses,
            m[:total].reshape(shape),
            loss_agg_mode=mode,
            weights=w[:total].reshape(shape) if weighted else None,
            **options,
        )
        close(loss, np.where(inside, factor * np.where(inside, seen(x)[:total], 0), 0).sum())
        (2 * loss).backward()
        close(losses.grad.reshape(-1), 2 * factor)
        # a loss that needs no gradient goes another way
        assert loss.item() == aggregate(
            losses.detach(),
            m[:total].reshape(shape),
            loss_agg_mode=mode,
            weights=w[:total].reshape(shape) if weighted else None,
            **options,
        )


@pytest.mark.parametrize("ids", [[3, 3, 4, 4, 4, 6], [-2, -2, 90000, 90000, 90000, 2**40]])
def test_groups_of_close_and_of_distant_ids(ids):
    scores, every = normal(60, 11), np.ones(60, dtype=bool)
    got = group_normalize(torch.from_numpy(scores).float(), torch.tensor(ids * 10))
    close(got, oracle.group_normalize(scores, ids * 10, every, scale="std", baseline="mean", ddof=1, eps=1e-6))


class Seen(TorchDispatchMode):
    """The ops that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_looks_sees_the_op():
    x = torch.tensor([1.0, 2.0, 4.0])
    plain = whiten(x)
    with Seen() as mode:
        assert torch.equal(whiten(x), plain)
    assert any("fastrl.whiten" in name for name in mode.names)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: whiten(x) + 1)(x)
    assert "torch.ops.fastrl.whiten" in graph.code
    assert torch.equal(graph(x), plain + 1)


def test_gradients_flow_whatever_else_is_plain():
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    kl_divergence(x, torch.tensor([-1.5, -1.0]), kind="k2").sum().backward()
    assert x.grad.tolist() == [0.5, -1.0]
    with torch.no_grad():
        assert not kl_divergence(x, torch.zeros(2), kind="k2").requires_grad
    with torch.inference_mode():
        inside = whiten(torch.arange(5.0))
    assert torch.equal(inside, whiten(torch.arange(5.0)))


def test_autocast_and_the_default_type_change_nothing(request):
    rewards, values, mask = normal(T, 12), normal(T, 13), mask_of(T, 14, 0.95)
    r, v, m = (torch.from_numpy(x) for x in (rewards.astype(np.float32), values.astype(np.float32), mask))
    want = oracle.gae(seen(r), seen(v), mask, offsets_of(LENGTHS), 1.0, 0.99)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gae(r, v, m, gamma=1.0, gae_lambda=0.99, cu_seqlens=cu(LENGTHS))
    for found, expected in zip(got, want, strict=True):
        close(found, expected)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)  # counts 701 as 700
    rows = torch.ones(2, 701, dtype=torch.float32)
    assert aggregate(rows, rows, loss_agg_mode="seq-mean-token-mean").item() == pytest.approx(1, rel=1e-6)


def test_whitened_constants_stay_inside_the_mask():
    x, mask = torch.tensor([1.0, 1.0, 5.0]), torch.tensor([1, 1, 0])
    for given in ({}, {"mean": 1.0, "var": 0.0}):
        out = whiten(x, mask, eps=0.0, **given)
        assert out[:2].isnan().all() and out[2] == 0
