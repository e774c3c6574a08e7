"""log_prob against float64 formulas written out with NumPy: values, gradients, strides, extremes, bad input."""

import numpy as np
import pytest
import torch
from kernel_cases import TRITON

from fastrl.kernels import LogProbs, log_prob

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}


def by_hand(logits, labels, temperature=1.0, ignore_index=-100):
    """log_prob, entropy, sum of squares in float64 NumPy, one row at a time."""
    z = logits.detach().double().numpy().reshape(-1, logits.shape[-1])
    y = labels.numpy().reshape(-1)
    t = np.broadcast_to(np.asarray(temperature, dtype=np.float64), labels.shape).reshape(-1)
    out = np.zeros((3, len(y)))
    for i in range(len(y)):
        if y[i] == ignore_index:
            continue
        row = z[i] / t[i]
        row = row - row.max()
        p = np.exp(row) / np.exp(row).sum()
        out[0, i] = row[y[i]] - np.log(np.exp(row).sum())
        out[1, i] = -sum(a * np.log(a) for a in p if a > 0)
        out[2, i] = (p * p).sum()
    return [torch.from_numpy(x.reshape(labels.shape)) for x in out]


def gradient_by_hand(logits, labels, temperature, g, h, ignore_index=-100):
    """d/dz of sum(g log_prob + h entropy) in float64 NumPy: g (1 - p) - h p (log p + H)."""
    z = logits.detach().double().numpy().reshape(-1, logits.shape[-1])
    y, g, h = (x.detach().numpy().reshape(-1) for x in (labels, g.double(), h.double()))
    t = np.broadcast_to(np.asarray(temperature, dtype=np.float64), labels.shape).reshape(-1)
    out = np.zeros_like(z)
    for i in range(len(y)):
        if y[i] == ignore_index:
            continue
        row = z[i] / t[i]
        with np.errstate(divide="ignore"):
            p = np.exp(row - row.max())
            p /= p.sum()
            log_p = np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)
        entropy = -(p * log_p).sum()
        out[i] = -g[i] * p - h[i] * p * (log_p + entropy)
        out[i, y[i]] += g[i]
        out[i] /= t[i]
    return torch.from_numpy(out.reshape(logits.shape))


def case(shape, dtype, seed=0, scale=4.0, ignore=True):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    if ignore and labels.numel() > 3:
        labels.view(-1)[1] = -100
    g, h = (torch.randn(shape[:-1], generator=generator) for _ in range(2))
    return logits, labels, g, h


@pytest.mark.parametrize("dtype", [*([] if TRITON else [torch.float64]), torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 131), (2, 7, 33), (1, 1), (3, 1, 2, 17), (2, 333) if TRITON else (9, 4097)])
@pytest.mark.parametrize("per_row", [False, True])
def test_values_and_gradients(dtype, shape, per_row):
    logits, labels, g, h = case(shape, dtype)
    temperature = torch.rand(shape[:-1], dtype=torch.float64) + 0.5 if per_row else 0.7
    plain = temperature.numpy() if per_row else temperature
    logits.requires_grad_()
    result = log_prob(logits, labels, temperature=temperature, want_entropy=True, want_sum_sq=True)
    assert isinstance(result, LogProbs)
    expected = by_hand(logits, labels, plain)
    for got, want in zip((result.log_prob, result.entropy, result.sum_sq), expected):
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    (got,) = torch.autograd.grad((result.log_prob * g + result.entropy * h).sum(), logits)
    want = gradient_by_hand(logits, labels, plain, g, h)
    assert got.dtype == dtype
    half_ulp = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, TOLERANCE[dtype])
    torch.testing.assert_close(got.double(), want, rtol=half_ulp, atol=1e-6 if dtype != torch.float64 else 1e-12)


def test_one_option_at_a_time_and_unpacking():
    logits, labels, _, _ = case((6, 50), torch.float32)
    value, entropy = log_prob(logits, labels)
    assert entropy is None and log_prob(logits, labels).sum_sq is None
    torch.testing.assert_close(value.double(), by_hand(logits, labels)[0], rtol=1e-5, atol=1e-5)
    only = log_prob(logits, labels, want_sum_sq=True)
    assert only.entropy is None
    torch.testing.assert_close(only.sum_sq.double(), by_hand(logits, labels)[2], rtol=1e-5, atol=1e-6)
    assert not log_prob(logits.requires_grad_(), labels, want_sum_sq=True).sum_sq.requires_grad


@pytest.mark.skipif(TRITON, reason="float64 always takes the reference")
def test_gradcheck():
    logits, labels, _, _ = case((4, 9), torch.float64)
    logits.requires_grad_()
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.9], dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda z: tuple(log_prob(z, labels, temperature=temperature, want_entropy=True)), (logits,)
    )
    torch.autograd.gradcheck(lambda z: log_prob(z, labels).log_prob, (logits,))


@pytest.mark.parametrize("kind", ["shifted slice", "transposed", "strided rows", "every second column", "expanded"])
def test_strides(kind):
    logits, labels, g, h = case((4, 6, 35), torch.float32)
    view = {
        "shifted slice": lambda: logits[:, :-1],
        "transposed": lambda: logits.transpose(0, 1),
        "strided rows": lambda: logits[::2, 1::2],
        "every second column": lambda: logits[..., ::2],
        "expanded": lambda: logits[:1].expand(3, 6, 35),
    }[kind]()
    labels = torch.randint(0, view.shape[-1], view.shape[:-1])
    g, h = torch.randn(view.shape[:-1]), torch.randn(view.shape[:-1])
    leaf = view.detach().requires_grad_()
    result = log_prob(leaf, labels, want_entropy=True)
    torch.testing.assert_close(result.log_prob.double(), by_hand(view, labels)[0], rtol=1e-5, atol=1e-5)
    (got,) = torch.autograd.grad((result.log_prob * g + result.entropy * h).sum(), leaf)
    torch.testing.assert_close(got.double(), gradient_by_hand(view, labels, 1.0, g, h), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_label_dtypes(dtype):
    logits, labels, _, _ = case((5, 40), torch.float32, ignore=False)
    torch.testing.assert_close(log_prob(logits, labels.to(dtype))[0], log_prob(logits, labels)[0], rtol=0, atol=0)


def test_upstream_gradient_that_is_expanded():
    logits, labels, _, _ = case((5, 40), torch.float32)
    leaf = logits.requires_grad_()
    (got,) = torch.autograd.grad(log_prob(leaf, labels).log_prob.sum(), leaf)
    want = gradient_by_hand(logits, labels, 1.0, torch.ones(5), torch.zeros(5))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "temperature"), [(1e4, 1.0), (1e4, 0.1), (1e38, 1.0)])
def test_extreme_logits(size, temperature):
    logits = torch.tensor([[size, 0.0, -size], [size, size, -size], [-size, -size, -size]], requires_grad=True)
    labels = torch.tensor([1, 0, 2])
    result = log_prob(logits, labels, temperature=temperature, want_entropy=True)
    assert result.log_prob.tolist() == pytest.approx([-size / temperature, -np.log(2), -np.log(3)], rel=1e-6)
    assert result.entropy.tolist() == pytest.approx([0, np.log(2), np.log(3)], abs=1e-6)
    (got,) = torch.autograd.grad((result.log_prob + result.entropy).sum(), logits)
    want = torch.tensor([[-1, 1, 0], [0.5, -0.5, 0], [-1 / 3, -1 / 3, 2 / 3]])
    torch.testing.assert_close(got, want / temperature, rtol=1e-5, atol=1e-5)


def test_minus_infinity_is_a_probability_of_zero():
    inf = float("inf")
    logits = torch.tensor([[0.0, -inf, 1.0, -inf], [-inf, -inf, 2.0, -inf]], requires_grad=True)
    result = log_prob(logits, torch.tensor([2, 2]), want_entropy=True, want_sum_sq=True)
    p = 1 / (1 + np.exp(-1))
    assert result.log_prob.tolist() == pytest.approx([np.log(p), 0], abs=1e-6)
    assert result.entropy.tolist() == pytest.approx([-p * np.log(p) - (1 - p) * np.log(1 - p), 0], abs=1e-6)
    (got,) = torch.autograd.grad((result.log_prob + result.entropy).sum(), logits)
    assert torch.isfinite(got).all() and (got[:, 1] == 0).all() and (got[1] == 0).all()
    assert log_prob(logits, torch.tensor([1, 2])).log_prob[0] == -inf


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_ignored_rows_are_not_read(poison):
    logits, labels, g, h = case((5, 40), torch.float32, ignore=False)
    clean = log_prob(logits, labels, want_entropy=True)
    labels[2] = 7
    dirty = logits.clone()
    dirty[2] = poison
    dirty.requires_grad_()
    got = log_prob(dirty, labels, want_entropy=True, want_sum_sq=True, ignore_index=7)
    keep = labels != 7
    assert torch.equal(got.log_prob[keep], clean.log_prob[keep])
    assert (got.log_prob[~keep] == 0).all() and (got.entropy[~keep] == 0).all() and (got.sum_sq[~keep] == 0).all()
    (grad,) = torch.autograd.grad((got.log_prob * g + got.entropy * h).sum(), dirty)
    assert (grad[~keep] == 0).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_no_rows(shape):
    logits = torch.zeros(shape, requires_grad=True)
    result = log_prob(logits, torch.zeros(shape[:-1], dtype=torch.int64), want_entropy=True, want_sum_sq=True)
    assert result.log_prob.shape == result.entropy.shape == result.sum_sq.shape == shape[:-1]
    (grad,) = torch.autograd.grad(result.log_prob.sum(), logits)
    assert grad.shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels has shape \[3\]: \[4\]"),
        ({"labels": torch.zeros(4)}, "labels has dtype float32"),
        ({"labels": torch.tensor([0, 1, 9, 2])}, r"labels\[2\] = 9: use 0 <= label < 9"),
        ({"labels": torch.tensor([0, -1, 0, 2])}, r"labels\[1\] = -1"),
        ({"logits": torch.zeros(4, 0)}, "V >= 1"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int64)}, "logits has dtype int64"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \[3\]"),
    ],
)
def test_bad_input(change, message):
    arguments = {"logits": torch.zeros(4, 9), "labels": torch.zeros(4, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=message):
        log_prob(arguments.pop("logits"), arguments.pop("labels"), **arguments)


def test_second_derivative_is_refused():
    logits, labels, _, _ = case((5, 40), torch.float32)
    leaf = logits.requires_grad_()
    (grad,) = torch.autograd.grad(log_prob(leaf, labels).log_prob.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.skipif(TRITON, reason="the op is registered once for both")
def test_compile_and_opcheck():
    logits, labels, _, _ = case((5, 40), torch.float32)
    compiled = torch.compile(
        lambda z, y: log_prob(z, y, temperature=0.9, want_entropy=True), fullgraph=True, backend="aot_eager"
    )
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    compiled(a, labels).entropy.sum().backward()
    log_prob(b, labels, temperature=0.9, want_entropy=True).entropy.sum().backward()
    assert torch.equal(a.grad, b.grad)
    temperature = torch.rand(5) + 0.5
    torch.library.opcheck(
        torch.ops.fastrl.log_prob.default, (a.detach().requires_grad_(), labels, temperature, 1.0, True, True, -100)
    )
