"""linear_log_prob and linear_token_loss against float64 formulas with all logits in memory, and finite differences."""

import pytest
import torch
from kernel_cases import TRITON

from fastrl.kernels import linear_log_prob, linear_token_loss

# dtype -> (relative tolerance of values, of gradients as norm of the difference over the norm)
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-5, 3e-6), torch.bfloat16: (3e-2, 3e-2)}


def naive(hidden, weight, bias, labels, temperature=1.0, scale=None, softcap=None):
    """log_prob, entropy, sum of squares [N] with autograd in float64, logits written out."""
    u = hidden.double() @ weight.double().t()
    if bias is not None:
        u = u + bias.double()
    u = u * (scale or 1.0)
    if softcap:
        u = softcap * torch.tanh(u / softcap)
    z = u / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    kept = labels >= 0
    picked = log_p.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    return [torch.where(kept, x, 0.0) for x in (picked, -(p * log_p).sum(-1), (p * p).sum(-1))]


ROWS = 11 if TRITON else 37  # the interpreter takes its time


def case(dtype, count=ROWS, size=24, vocabulary=131, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator).to(dtype).requires_grad_()  # noqa: E731
    hidden, weight, b = make(count, size), make(vocabulary, size), make(vocabulary)
    if dtype == torch.bfloat16:
        with torch.no_grad():
            weight.mul_(0.2)
    labels = torch.randint(0, vocabulary, (count,), generator=generator)
    if count > 3:
        labels[3] = -100
    return hidden, weight, (b if bias else None), labels


def close(got, want, tolerance):
    assert ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item() <= tolerance


def inputs(*tensors):
    return [x for x in tensors if x is not None]


OPTIONS = [{}, {"logit_scale": 0.7}, {"logit_softcap": 3.0}, {"logit_scale": 1.3, "logit_softcap": 4.0}]
# in the interpreter float64 would take the reference, and one option is enough to see bfloat16 loads
KINDS = [
    (d, o) for d in TOLERANCE for o in OPTIONS if not TRITON or d == torch.float32 or (d != torch.float64 and not o)
]


@pytest.mark.parametrize(("dtype", "options"), KINDS)
@pytest.mark.parametrize(
    ("bias", "per_row", "chunk"), [(True, True, 4), (False, False, None), *([] if TRITON else [(True, False, 1)])]
)
def test_both_functions(dtype, options, bias, per_row, chunk):
    hidden, weight, b, labels = case(dtype, bias=bias)
    temperature = torch.rand(ROWS) + 0.5 if per_row else 0.8
    g, h = torch.randn(2, ROWS, dtype=torch.float64)
    given = {"bias": b, "temperature": temperature, "want_entropy": True, "want_sum_sq": True, "chunk_size": chunk}
    want = naive(hidden, weight, b, labels, temperature, options.get("logit_scale"), options.get("logit_softcap"))
    want_loss = (want[0] * g + want[1] * h).sum()
    want_grads = torch.autograd.grad(want_loss, inputs(hidden, weight, b))
    value_tolerance, grad_tolerance = TOLERANCE[dtype]

    rows = linear_log_prob(hidden, weight, labels, **given, **options)
    loss, again, stats = linear_token_loss(
        hidden, weight, labels,
        lambda lp, entropy, part: (lp * g[part].to(lp.dtype) + entropy * h[part].to(lp.dtype), {"double": 2 * lp}),
        **given, **options,
    )  # fmt: skip
    for got, also, expected in zip((*rows, rows.sum_sq), (*again, again.sum_sq), want):
        close(got, expected, value_tolerance)
        assert torch.equal(got, also) and not also.requires_grad
    assert torch.equal(stats["double"], 2 * again.log_prob) and not stats["double"].requires_grad
    size = (want[0] * g).abs().sum() + (want[1] * h).abs().sum()  # the terms may cancel
    assert abs(loss.item() - want_loss.item()) <= value_tolerance * size
    recomputed = torch.autograd.grad((rows.log_prob * g + rows.entropy * h).sum(), inputs(hidden, weight, b))
    in_forward = torch.autograd.grad(loss * 0.5, inputs(hidden, weight, b))
    for x, first, second, expected in zip(inputs(hidden, weight, b), recomputed, in_forward, want_grads):
        assert first.dtype == second.dtype == x.dtype and first.shape == x.shape
        close(first, expected, grad_tolerance)
        close(2 * second, expected, grad_tolerance)


@pytest.mark.skipif(TRITON, reason="float64 always takes the reference")
def test_gradcheck():
    hidden, weight, bias, labels = case(torch.float64, count=5, size=3, vocabulary=7)
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.9, 1.1], dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda a, w, b: tuple(
            linear_log_prob(
                a, w, labels, bias=b, temperature=temperature, want_entropy=True, logit_softcap=2.0, chunk_size=2
            )
        ),
        (hidden, weight, bias),
    )
    torch.autograd.gradcheck(
        lambda a, w, b: linear_token_loss(
            a, w, labels, lambda lp, e, part: lp.exp() * e.square(), bias=b, want_entropy=True, chunk_size=2
        )[0],
        (hidden, weight, bias),
    )


def ppo_like(advantages, old, mask):
    def loss(log_prob, entropy, part):
        ratio = (log_prob - old[part]).exp()
        a = advantages[part]
        value = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        return torch.where(mask[part], value, 0.0) / 20, {"clipped": (ratio > 1.2).float()}

    return loss


def test_nonlinear_loss_does_not_depend_on_chunks():
    hidden, weight, _, labels = case(torch.float32, bias=False)
    g = torch.Generator().manual_seed(3)
    advantages, mask = torch.randn(ROWS, generator=g), torch.rand(ROWS, generator=g) > 0.3
    old = naive(hidden, weight, None, labels)[0].float().detach() + 0.3 * torch.randn(ROWS, generator=g)
    fn = ppo_like(advantages, old, mask)
    value = fn(naive(hidden, weight, None, labels)[0], None, slice(0, ROWS))[0].sum()
    want = torch.autograd.grad(value, (hidden, weight))
    for chunk in (5, 1000) if TRITON else (1, 5, ROWS, 1000, None):
        loss, _, stats = linear_token_loss(hidden, weight, labels, fn, chunk_size=chunk)
        close(loss, value, 1e-5)
        assert stats["clipped"].shape == (ROWS,)
        for got, expected in zip(torch.autograd.grad(loss, (hidden, weight)), want):
            close(got, expected, 3e-6)


def test_slices_cover_the_rows_in_order():
    hidden, weight, _, labels = case(torch.float32, bias=False)
    seen = []
    linear_token_loss(hidden, weight, labels, lambda lp, e, part: seen.append(part) or lp, chunk_size=3)
    assert [i for part in seen for i in range(ROWS)[part]] == list(range(ROWS))
    assert all(part.stop - part.start <= 3 for part in seen)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_ignored_and_masked_rows_may_hold_anything(poison):
    hidden, weight, bias, labels = case(torch.float32)
    g = torch.randn(ROWS)
    want = torch.autograd.grad((naive(hidden, weight, bias, labels)[0] * g).sum(), (hidden, weight, bias))
    with torch.no_grad():
        hidden[3] = poison  # its label is ignored
    rows = linear_log_prob(hidden, weight, labels, bias=bias, want_entropy=True, chunk_size=4)
    assert rows.log_prob[3] == 0 and rows.entropy[3] == 0 and torch.isfinite(rows.log_prob).all()
    loss, _, _ = linear_token_loss(hidden, weight, labels, lambda lp, e, part: lp * g[part], bias=bias, chunk_size=4)
    first = torch.autograd.grad((rows.log_prob * g).sum(), (hidden, weight, bias))
    for got, again, expected in zip(first, torch.autograd.grad(loss, (hidden, weight, bias)), want):
        close(got, expected, 3e-6)
        close(again, expected, 3e-6)
    # a row that the loss masks is as harmless, ignored or not
    mask = torch.arange(ROWS) != 3
    labels = labels.clone()
    labels[3] = 0
    loss, _, _ = linear_token_loss(
        hidden, weight, labels, lambda lp, e, part: torch.where(mask[part], lp * g[part], 0.0), bias=bias, chunk_size=4
    )
    for got, expected in zip(torch.autograd.grad(loss, (hidden, weight, bias)), want):
        close(got, expected, 3e-6)


def test_no_rows_give_zero_gradients():
    hidden, weight, bias, labels = case(torch.float32, count=0)
    loss, rows, stats = linear_token_loss(hidden, weight, labels, lambda lp, e, part: lp, bias=bias, want_entropy=True)
    assert loss == 0 and rows.log_prob.shape == rows.entropy.shape == (0,) and stats == {}
    loss.backward()
    assert hidden.grad.shape == (0, 24) and (weight.grad == 0).all() and (bias.grad == 0).all()
    rows = linear_log_prob(hidden, weight, labels, bias=bias)
    for got, like in zip(torch.autograd.grad(rows.log_prob.sum(), (hidden, weight, bias)), (hidden, weight, bias)):
        assert got.shape == like.shape and (got == 0).all()


@pytest.mark.parametrize("want_entropy", [False, True])
def test_weights_in_place_of_a_function(want_entropy):
    hidden, weight, bias, labels = case(torch.float32)
    weights = torch.randn(ROWS, dtype=torch.float64)
    weights[5] = 0
    want = naive(hidden, weight, bias, labels)
    want_loss = (want[0] * weights).sum()
    loss, rows, stats = linear_token_loss(
        hidden, weight, labels, weights.float(), bias=bias, want_entropy=want_entropy, chunk_size=4
    )
    close(loss, want_loss, 1e-5)
    close(rows.log_prob, want[0], 1e-5)
    assert stats == {} and (rows.entropy is not None) == want_entropy
    want_grads = torch.autograd.grad(want_loss, (hidden, weight, bias))
    for got, expected in zip(torch.autograd.grad(loss, (hidden, weight, bias)), want_grads):
        close(got, expected, 3e-6)
    with torch.no_grad():
        again = linear_token_loss(hidden, weight, labels, weights.float(), bias=bias)[1]
    close(again.log_prob, rows.log_prob, 1e-6)


def test_loss_that_does_not_depend_on_the_model():
    hidden, weight, bias, labels = case(torch.float32)
    loss, _, _ = linear_token_loss(hidden, weight, labels, lambda lp, e, part: torch.ones_like(lp), bias=bias)
    assert loss == ROWS
    assert all((x == 0).all() for x in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_only_what_is_needed_gets_a_gradient():
    hidden, weight, bias, labels = case(torch.float32)
    loss, _, _ = linear_token_loss(hidden, weight.detach(), labels, lambda lp, e, part: lp, bias=bias.detach())
    linear_log_prob(hidden.detach(), weight, labels).log_prob.sum().backward()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None and bias.grad is None


def test_a_callback_may_use_another_head():
    hidden, weight, bias, labels = case(torch.float32)
    other, _, _, _ = case(torch.float32, seed=9)
    with torch.no_grad():
        want = linear_log_prob(other, weight, labels).log_prob

    def difference(lp, entropy, part):
        return (lp - linear_log_prob(other[part].detach(), weight.detach(), labels[part]).log_prob).square()

    expected = (naive(hidden, weight, bias, labels)[0] - want).square().sum()
    want_grads = torch.autograd.grad(expected, (hidden, weight, bias))
    loss, _, _ = linear_token_loss(hidden, weight, labels, difference, bias=bias, chunk_size=4)
    close(loss, expected, 1e-5)
    for got, grad in zip(torch.autograd.grad(loss, (hidden, weight, bias)), want_grads):
        close(got, grad, 3e-6)


def test_no_grad_makes_no_gradient():
    hidden, weight, bias, labels = case(torch.float32)
    seen = []
    with torch.no_grad():
        loss, _, _ = linear_token_loss(
            hidden, weight, labels, lambda lp, e, part: seen.append(lp.requires_grad) or lp, bias=bias
        )
    assert not loss.requires_grad and seen == [False]
    close(loss, naive(hidden, weight, bias, labels)[0].sum(), 1e-5)


def test_a_second_backward_is_refused():
    hidden, weight, _, labels = case(torch.float32)
    loss, _, _ = linear_token_loss(hidden, weight, labels, lambda lp, e, part: lp)
    first = torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()
    loss, _, _ = linear_token_loss(hidden, weight, labels, lambda lp, e, part: lp)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_gradient_added_to_a_buffer():
    hidden, weight, bias, labels = case(torch.float32)
    loss, _, _ = linear_token_loss(hidden, weight, labels, lambda lp, e, part: lp, bias=bias, chunk_size=4)
    want = torch.autograd.grad(loss, (hidden, weight, bias))
    buffer = torch.ones_like(weight)
    for _ in range(2):
        loss, _, _ = linear_token_loss(
            hidden, weight, labels, lambda lp, e, part: lp, bias=bias, chunk_size=4, weight_grad=buffer
        )
        loss.backward()
    assert weight.grad is None
    close(buffer - 1, 2 * want[1], 1e-6)
    close(hidden.grad, 2 * want[0], 1e-6)
    close(bias.grad, 2 * want[2], 1e-6)
    before = buffer.clone()
    with torch.no_grad():
        linear_token_loss(hidden, weight, labels, lambda lp, e, part: lp, weight_grad=buffer)
    assert torch.equal(buffer, before)
    loss, _, _ = linear_token_loss(hidden, weight, labels, lambda lp, e, part: lp, weight_grad=buffer)
    with pytest.raises(RuntimeError, match="upstream gradient of 1"):
        (loss * 2).backward()


def test_master_weight_and_autocast():
    hidden, weight, bias, labels = case(torch.bfloat16)
    master = weight.detach().float().requires_grad_()
    short = linear_token_loss(hidden, master, labels, lambda lp, e, part: lp, bias=bias, chunk_size=4)[0]
    grads = torch.autograd.grad(short, (hidden, master, bias))
    assert [x.dtype for x in grads] == [torch.bfloat16, torch.float32, torch.bfloat16]
    want = torch.autograd.grad(naive(hidden, weight, bias, labels)[0].sum(), (hidden, weight, bias))
    for got, expected in zip(grads, want):
        close(got, expected, 3e-2)
    wide = hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_token_loss(wide, master, labels, lambda lp, e, part: lp, bias=bias, chunk_size=4)[0]
        rows = linear_log_prob(wide, master, labels, bias=bias, chunk_size=4)
    assert torch.equal(cast, short) and rows.log_prob.dtype == torch.float32
    close(rows.log_prob.sum(), short, 1e-6)
    again = torch.autograd.grad(cast, (wide, master))
    assert again[0].dtype == torch.float32 and torch.equal(again[0].bfloat16(), grads[0])
    assert torch.equal(again[1], grads[1])


def test_strided_operands():
    hidden, weight, _, labels = case(torch.float32)
    wide = torch.zeros(ROWS, 48)
    wide[:, ::2] = hidden.detach()
    tall = weight.detach().t().contiguous().t()
    g = torch.randn(ROWS)
    want = torch.autograd.grad((linear_log_prob(hidden, weight, labels)[0] * g).sum(), (hidden, weight))
    a, w = wide[:, ::2].requires_grad_(), tall.requires_grad_()
    loss, _, _ = linear_token_loss(a, w, labels, lambda lp, e, part: lp * g[part])
    for got, expected in zip(torch.autograd.grad(loss, (a, w)), want):
        close(got, expected, 1e-6)


@pytest.mark.parametrize("function", ["linear_log_prob", "linear_token_loss"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9, 4)}, r"weight has shape \[9, 4\]: \[V, 3\]"),
        ({"weight": torch.zeros(9, 3, 1)}, "weight has shape"),
        ({"hidden": torch.zeros(5)}, "hidden has shape"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels has shape \[4\]: \[5\]"),
        ({"labels": torch.full((5,), 9)}, r"labels\[0\] = 9: use 0 <= label < 9"),
        ({"bias": torch.zeros(8)}, r"bias has shape \[8\]: \[9\]"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"logit_softcap": 0.0}, "logit_softcap = 0.0"),
        ({"logit_scale": -2.0}, "logit_scale = -2.0"),
        ({"chunk_size": 0}, "chunk_size = 0"),
    ],
)
def test_bad_input(function, change, message):
    given = {"hidden": torch.zeros(5, 3), "weight": torch.zeros(9, 3), "labels": torch.zeros(5, dtype=torch.int64)}
    given |= change
    operands = [given.pop(name) for name in ("hidden", "weight", "labels")]
    with pytest.raises(ValueError, match=message):
        if function == "linear_log_prob":
            linear_log_prob(*operands, **given)
        else:
            linear_token_loss(*operands, lambda lp, e, part: lp, **given)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda lp, e, part: lp.sum(), r"loss of shape \[\]: one loss per row, \[5\]"),
        (lambda lp, e, part: 1.0, "loss of shape float"),
        (lambda lp, e, part: (lp, {"a": lp.sum()}), r"stats\['a'\] of shape \[\]"),
        (None, "token_loss_fn = None"),
        (torch.ones(4), r"token_loss_fn has shape \[4\]: \[5\]"),
    ],
)
def test_bad_callback(fn, message):
    with pytest.raises(ValueError, match=message):
        linear_token_loss(torch.zeros(5, 3), torch.zeros(9, 3), torch.zeros(5, dtype=torch.int64), fn)


@pytest.mark.skipif(TRITON, reason="the op is registered once for both")
def test_compile_and_opcheck():
    hidden, weight, bias, labels = case(torch.float32)
    compiled = torch.compile(
        lambda a, w, b: linear_log_prob(a, w, labels, bias=b, want_entropy=True).entropy.sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    got = torch.autograd.grad(compiled(hidden, weight, bias), (hidden, weight, bias))
    want = torch.autograd.grad(
        linear_log_prob(hidden, weight, labels, bias=bias, want_entropy=True).entropy.sum(), (hidden, weight, bias)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    operands = (hidden, weight, bias, labels, torch.ones(ROWS), 1.0, 1.0, 0.0, -100, True, True, 0, torch.float32)
    torch.library.opcheck(torch.ops.fastrl.linear_log_prob.default, operands)
