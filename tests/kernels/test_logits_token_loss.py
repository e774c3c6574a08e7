"""logits_token_loss: the loss of a callback on logits in memory, and the gradient in the logits' place."""

import pytest
import torch
from kernel_cases import TRITON

from fastrl.kernels import log_prob, logits_token_loss


def case(shape=(6, 41), dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(shape, generator=generator)).to(dtype)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    return logits, labels, torch.randn(labels.numel(), generator=generator, dtype=torch.float64)


def expected(logits, labels, g, temperature=1.0, softcap=None):
    """Loss sum(g p(label) + entropy^2 / 2) and its gradient in float64 with autograd."""
    z = logits.detach().double().requires_grad_()
    capped = softcap * torch.tanh(z / softcap) if softcap else z
    log_p = torch.log_softmax(capped / temperature, -1)
    kept = labels >= 0
    picked = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = torch.where(kept, g.view(labels.shape) * picked.exp() + 0.5 * entropy.square(), g.view(labels.shape)).sum()
    return loss.detach(), torch.autograd.grad(loss, z)[0]


def callback(g):
    return lambda lp, entropy, part: (g[part].to(lp.dtype) * lp.exp() + 0.5 * entropy.square(), {"lp": lp})


@pytest.mark.parametrize("dtype", [*([] if TRITON else [torch.float64]), torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 41), (2, 5, 33)])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("chunk", [4] if TRITON else [None, 2])
def test_values_and_gradients(dtype, shape, inplace, chunk):
    logits, labels, g = case(shape, dtype)
    labels.view(-1)[2] = -100
    want_loss, want = expected(logits, labels, g, temperature=0.8, softcap=5.0)
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    loss, rows, stats = logits_token_loss(
        made, labels, callback(g), inplace=inplace, temperature=0.8, logit_softcap=5.0,
        want_entropy=True, want_sum_sq=True, chunk_size=chunk,
    )  # fmt: skip
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    assert rows.log_prob.shape == rows.entropy.shape == rows.sum_sq.shape == labels.shape
    assert torch.equal(stats["lp"].view(labels.shape), rows.log_prob)
    assert torch.equal(made.detach(), logits) != inplace
    (3 * loss).backward()
    half_ulp = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(leaf.grad.double() / 3, want, rtol=half_ulp, atol=1e-6)


def test_the_gradient_takes_no_memory():
    logits, labels, g = case()
    made = logits.clone().requires_grad_() * 1
    loss, _, _ = logits_token_loss(made, labels, callback(g), want_entropy=True)
    (grad,) = torch.autograd.grad(loss, made)
    assert grad.data_ptr() == made.data_ptr()


@pytest.mark.parametrize("view", ["shifted", "columns", "transposed", "expanded"])
def test_strides(view):
    logits, _, _ = case((4, 6, 35))
    taken = {
        "shifted": logits[:, :-1],
        "columns": logits[..., 1::2],
        "transposed": logits.transpose(0, 1),
        "expanded": logits[:1].expand(3, 6, 35),
    }[view]
    labels = torch.randint(0, taken.shape[-1], taken.shape[:-1])
    g = torch.randn(labels.numel(), dtype=torch.float64)
    want_loss, want = expected(taken, labels, g)
    leaf = taken.detach().requires_grad_()
    loss, _, _ = logits_token_loss(leaf, labels, callback(g), want_entropy=True)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0].double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [*([] if TRITON else [torch.float64]), torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [True, False])
def test_weights_in_place_of_a_function(dtype, inplace):
    logits, labels, g = case((2, 5, 33), dtype)
    labels[1, 2], g[4] = -100, 0
    log_p = torch.log_softmax(logits.double() / 0.8, -1)
    kept = (labels >= 0) * g.view(labels.shape)
    picked = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    one = torch.nn.functional.one_hot(labels.clamp(min=0), 33)
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    loss, rows, _ = logits_token_loss(made, labels, g.view(labels.shape).to(dtype), inplace=inplace, temperature=0.8)
    weight = kept.to(dtype).double()
    torch.testing.assert_close(loss.double(), (weight * picked).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.log_prob.double(), torch.where(labels >= 0, picked, 0), rtol=1e-5, atol=1e-5)
    loss.backward()
    want = weight.unsqueeze(-1) * (one - log_p.exp()) / 0.8
    torch.testing.assert_close(leaf.grad.double(), want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_reuse_is_an_error_never_a_wrong_number():
    logits, labels, g = case()
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    loss, _, _ = logits_token_loss(made, labels, callback(g), want_entropy=True)
    with pytest.raises(RuntimeError, match="replaced by their gradient"):
        logits_token_loss(made, labels, callback(g), want_entropy=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()
    # somebody else's backward needs the logits that are gone
    made = leaf * 1
    other = made.square().sum()
    loss, _, _ = logits_token_loss(made, labels, callback(g), want_entropy=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()
    # a buffer that has been filled again is new
    buffer = logits.clone().requires_grad_()
    logits_token_loss(buffer, labels, callback(g), want_entropy=True)
    with torch.no_grad():
        buffer.copy_(logits)
    logits_token_loss(buffer, labels, callback(g), want_entropy=True)


def test_without_gradient_the_logits_stay():
    logits, labels, g = case()
    before = logits.clone()
    with torch.no_grad():
        loss, rows, _ = logits_token_loss(logits.requires_grad_(), labels, callback(g), want_entropy=True)
    assert torch.equal(before, logits) and not loss.requires_grad
    assert torch.equal(rows.log_prob, log_prob(logits, labels).log_prob)


def test_ignored_rows_and_no_rows():
    logits, labels, _ = case()
    labels[4] = -100
    logits[4] = float("nan")
    made = logits.requires_grad_() * 1
    loss, rows, _ = logits_token_loss(made, labels, lambda lp, e, part: lp)
    (grad,) = torch.autograd.grad(loss, made)
    assert rows.log_prob[4] == 0 and (grad[4] == 0).all() and torch.isfinite(grad).all() and torch.isfinite(loss)
    empty = torch.zeros(0, 5, requires_grad=True)
    loss, _, _ = logits_token_loss(empty, torch.zeros(0, dtype=torch.int64), lambda lp, e, part: lp)
    assert torch.autograd.grad(loss, empty)[0].shape == (0, 5)


@pytest.mark.skipif(TRITON, reason="float64 always takes the reference")
def test_gradcheck():
    logits, labels, g = case((4, 7), torch.float64)
    torch.autograd.gradcheck(
        lambda z: logits_token_loss(z, labels, callback(g), want_entropy=True, inplace=False)[0],
        (logits.requires_grad_(),),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels has shape"),
        ({"labels": torch.full((4,), 9)}, r"labels\[0\] = 9"),
        ({"token_loss_fn": 3}, "token_loss_fn = 3"),
        ({"temperature": 0}, "temperature = 0"),
        ({"chunk_size": -1}, "chunk_size = -1"),
    ],
)
def test_bad_input(change, message):
    given = {
        "logits": torch.zeros(4, 9),
        "labels": torch.zeros(4, dtype=torch.int64),
        "token_loss_fn": lambda lp, e, p: lp,
    }
    with pytest.raises(ValueError, match=message):
        logits_token_loss(**(given | change))
