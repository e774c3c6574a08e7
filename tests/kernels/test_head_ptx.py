"""The PTX of the head's row kernels, run on CPU tensors: values and gradients against float64, widths of the accesses.

Vocabularies span several tiles of the shipped launch configurations and a partial one; rows on and off 16-byte bounds.
"""

import mmap

import pytest
import torch
from kernel_cases import TRITON
from kernel_target import on_target

from fastrl.kernels import linear_log_prob, linear_token_loss, log_prob, logits_token_loss
from fastrl.kernels.log_prob.kernel import gradient_of_rows_triton, statistics_of_rows_triton, weighted_rows_triton
from fastrl.kernels.log_prob.reference import RowOptions, RowStatistics, empty_statistics
from fastrl.kernels.scale_kernel import scale_in_place

pytestmark = pytest.mark.skipif(TRITON, reason="the interpreter process cannot compile")

MAIN = "cuda:90"
TARGETS = [MAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in ("cuda:80", "cuda:100"))]
HALF_ULP = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def formula(logits, labels, temperature=1.0, softcap=None, ignore_index=-100):
    """log_prob, entropy, sum of squares in float64 with autograd."""
    z = logits.double()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    p = log_p.exp()
    kept = labels != ignore_index
    picked = log_p.gather(-1, torch.where(kept, labels, 0).unsqueeze(-1)).squeeze(-1)
    entropy = -torch.where(p > 0, p * log_p.clamp(min=-1e30), 0.0).sum(-1)
    return [torch.where(kept, x, 0.0) for x in (picked, entropy, (p * p).sum(-1))]


def close(got, want, rtol=1e-5, atol=2e-6):
    torch.testing.assert_close(got.detach().double(), want.detach().double(), rtol=rtol, atol=atol)


CASES = {  # name -> (vocabulary, dtype, temperature, softcap): tiles of 8192 above 16384 columns, of 2048 below
    "large bf16": (24880, torch.bfloat16, 0.7, None),
    "large off the grid": (24877, torch.bfloat16, 1.0, None),
    "large fp32, capped": (16400, torch.float32, "rows", 20.0),
    "small fp16": (4112, torch.float16, 1.3, None),
    "small off the grid": (4099, torch.float32, 1.0, None),
    "less than a tile": (37, torch.bfloat16, "rows", 3.0),
}


def every_target_for_one_case():
    for name in CASES:
        yield from ((name, target) for target in ([MAIN] if name != "large bf16" else ["cuda:80", MAIN, "cuda:100"]))
        if name != "large bf16":
            yield from (pytest.param(name, t, marks=pytest.mark.slow) for t in ("cuda:80", "cuda:100"))


@pytest.mark.parametrize(("name", "target"), list(every_target_for_one_case()))
def test_statistics_and_gradient(name, target):
    vocabulary, dtype, temperature, softcap = CASES[name]
    generator = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn((3, vocabulary), generator=generator)).to(dtype)
    logits[0, 5] = -float("inf")
    logits[1] = float("nan")  # an ignored row
    labels = torch.tensor([vocabulary - 1, -100, 11])
    rows = torch.tensor([0.5, 1.0, 1.5]) if temperature == "rows" else None
    g, h = torch.randn((2, 3), generator=generator)
    leaf = torch.where(labels.unsqueeze(1) < 0, 0.0, logits.float()).double().requires_grad_()
    want = formula(leaf, labels, rows.unsqueeze(1) if rows is not None else temperature, softcap)
    (want_grad,) = torch.autograd.grad((want[0] * g + want[1] * h).sum(), leaf)
    options = RowOptions(rows, 1.0 if rows is not None else temperature, 1.0, softcap or 0.0, -100)
    out = empty_statistics(3, logits, True, True)
    d_logits = torch.full_like(logits, float("nan"))
    alone = d_logits.clone()
    with on_target(target) as record:
        statistics_of_rows_triton(logits, labels, options, out)
        gradient_of_rows_triton(logits, labels, options, out, g, h, d_logits)
        gradient_of_rows_triton(logits, labels, options, out, g, None, alone)
    skewed = vocabulary % 16 != 0
    assert record[0].constants["SKEWED"] == record[1].constants["SKEWED"] == skewed
    for got, expected in zip(out[:3], want, strict=True):
        close(got, expected)
    close(d_logits, want_grad.nan_to_num(), rtol=HALF_ULP[dtype], atol=1e-6)
    assert (d_logits[1] == 0).all() and (alone[1] == 0).all()
    want = formula(leaf, labels, rows.unsqueeze(1) if rows is not None else temperature, softcap)
    (want_grad,) = torch.autograd.grad((want[0] * g).sum(), leaf)
    close(alone, want_grad.nan_to_num(), rtol=HALF_ULP[dtype], atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("vocabulary", [16400, 4099])
def test_weighted(vocabulary, target):
    generator = torch.Generator().manual_seed(6)
    logits = (3 * torch.randn((4, vocabulary), generator=generator)).to(torch.bfloat16)
    labels, weights = torch.tensor([3, vocabulary - 1, -100, 0]), torch.tensor([0.5, -2.0, 1.0, 0.0])
    leaf = logits.double().requires_grad_()
    want = formula(leaf, labels, 0.9)[0]
    (want_grad,) = torch.autograd.grad((want * weights).sum(), leaf)
    value = torch.full((4,), float("nan"))
    with on_target(target):
        weighted_rows_triton(logits, labels, RowOptions(None, 0.9), weights, value)
    close(value, want)
    close(logits, want_grad, rtol=2**-8, atol=1e-6)


def test_groups_of_rows_and_strided_columns():
    generator = torch.Generator().manual_seed(7)
    base = torch.randn((2, 4, 2 * 90), generator=generator)
    labels = torch.randint(0, 90, (2, 3), generator=generator)
    for view in (base[:, 1:, :90], base[:, :-1, ::2]):
        leaf = view.detach().double().requires_grad_()
        want = formula(leaf, labels)
        (want_grad,) = torch.autograd.grad((want[0] + want[1]).sum(), leaf)
        with on_target(MAIN):
            mine = view.detach().requires_grad_()
            got = log_prob(mine, labels, want_entropy=True)
            (grad,) = torch.autograd.grad((got.log_prob + got.entropy).sum(), mine)
        close(got.log_prob, want[0])
        close(grad, want_grad)


def test_a_label_outside_the_vocabulary_gives_nan_where_values_are_not_checked():
    # a GPU's labels are not read beforehand; a wrong one must neither leave the buffer nor give a number
    logits = torch.randn(2, 40)
    out = empty_statistics(2, logits, False, False)
    with on_target(MAIN):
        statistics_of_rows_triton(logits, torch.tensor([40, 7]), RowOptions(), out)
    assert out.log_prob.isnan().tolist() == [True, False]


@pytest.mark.parametrize("strides", [((1 << 31) + 16, 1), (1, 1 << 30)])
def test_offsets_beyond_32_bits(strides):
    # address space only: the pages in between are never touched
    elements = strides[0] + 4 * strides[1] + 1
    pages = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000))
    logits = torch.frombuffer(pages, dtype=torch.bfloat16).as_strided((2, 5), strides)
    logits.copy_(torch.randn((2, 5), generator=torch.Generator().manual_seed(2)))
    labels = torch.tensor([4, 2])
    leaf = logits.double().requires_grad_()
    want = formula(leaf, labels)[0]
    (want_grad,) = torch.autograd.grad(want.sum(), leaf)
    out = empty_statistics(2, logits, False, False)
    with on_target(MAIN):
        statistics_of_rows_triton(logits, labels, RowOptions(), out)
        gradient_of_rows_triton(logits, labels, RowOptions(), out, torch.ones(2), None, logits)
    close(out.log_prob, want)
    close(logits, want_grad, rtol=2**-8)


@pytest.mark.parametrize(
    "kind", ["statistics", "gradient", "weighted", "statistics off the grid", "gradient off the grid"]
)
def test_the_main_loop_moves_its_bytes_in_16_byte_accesses(kind):
    vocabulary = 151936 if "off" not in kind else 151933
    logits = torch.randn((1, vocabulary)).to(torch.bfloat16)
    labels, g = torch.tensor([7]), torch.tensor([0.5])
    out = empty_statistics(1, logits, True, False)
    RowStatistics(*(x.fill_(1) for x in out))
    with on_target(MAIN) as record:
        if kind.startswith("statistics"):
            statistics_of_rows_triton(logits, labels, RowOptions(), out)
        elif kind.startswith("gradient"):
            gradient_of_rows_triton(logits, labels, RowOptions(), out, g, g, logits)
        else:
            weighted_rows_triton(logits, labels, RowOptions(), g, out.log_prob)
    moved = record[0].loads + record[0].stores
    wide = sum(n for width, n in moved.items() if width >= 16)
    tail = vocabulary % 8192 / vocabulary if "off" in kind else 0  # the partial tile of a row off the grid
    assert wide >= (0.95 - tail) * sum(moved.values()), dict(moved)


@pytest.mark.parametrize(
    ("count", "dtype"), [(3 * 4096 + 77, torch.bfloat16), (4096, torch.float32), (5, torch.float32)]
)
def test_scaling_moves_nothing_for_a_factor_of_one(count, dtype):
    x = torch.randn(count).to(dtype)
    before = x.clone()
    with on_target(MAIN) as record:
        scale_in_place(x, torch.tensor(1.0))
        scale_in_place(x, torch.tensor(-0.5))
    assert torch.equal(x, (before.float() * -0.5).to(dtype))
    assert sum((record[0].loads + record[0].stores).values()) == 4 * record[0].grid[0]
    moved = record[1].loads + record[1].stores
    if count >= 4096:
        assert sum(n for width, n in moved.items() if width >= 16) >= 0.95 * (count // 4096 * 4096 / count) * sum(
            moved.values()
        )


def test_the_head_end_to_end():
    generator = torch.Generator().manual_seed(8)
    make = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()  # noqa: E731
    hidden, weight, bias = make(7, 12), make(300, 12), make(300)
    labels = torch.randint(0, 300, (7,), generator=generator)
    g = torch.randn(7, generator=generator)
    u = hidden.double() @ weight.double().t() + bias.double()
    want = formula(u, labels, 0.8, 5.0)
    want_loss = (want[0] * g + want[1].square()).sum()
    want_grads = torch.autograd.grad(want_loss, (hidden, weight, bias), retain_graph=True)
    (want_logits,) = torch.autograd.grad(want_loss, u)
    options = {"temperature": 0.8, "logit_softcap": 5.0, "want_entropy": True, "chunk_size": 3}
    fn = lambda lp, entropy, part: lp * g[part] + entropy.square()  # noqa: E731
    logits = u.detach().float().requires_grad_()
    with on_target(MAIN) as record:
        rows = linear_log_prob(hidden, weight, labels, bias=bias, **options)
        grads = torch.autograd.grad((rows.log_prob * g + rows.entropy.square()).sum(), (hidden, weight, bias))
        loss, _, _ = linear_token_loss(hidden, weight, labels, fn, bias=bias, **options)
        again = torch.autograd.grad(loss, (hidden, weight, bias))
        direct, _, _ = logits_token_loss(logits, labels, fn, **options)
        (d_logits,) = torch.autograd.grad(direct, logits)
    assert {entry.kernel for entry in record} == {"statistics_kernel", "gradient_kernel", "scale_kernel"}
    close(loss, want_loss)
    close(direct, want_loss)
    for first, second, expected in zip(grads, again, want_grads, strict=True):
        close(first, expected, rtol=1e-4, atol=1e-5)
        close(second, expected, rtol=1e-4, atol=1e-5)
    close(d_logits, want_logits, rtol=1e-4)
