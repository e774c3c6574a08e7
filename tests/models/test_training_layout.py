"""Attention over packed prefix trees against dense attention with an explicit mask, values and gradients in float64."""

import pytest
import torch
from tiny_models import ragged_batch

from fastrl.data.packing import pack
from fastrl.errors import ModelError
from fastrl.models import training_layout, varlen
from fastrl.models.kernel_check import what_is_wrong
from fastrl.models.tiles import TilePlan, tiled_attention
from fastrl.models.training_layout import TrainingLayout, choose_attention

CPU = torch.device("cpu")
BATCHES = {
    "groups": ([7, 1, 4], [[3, 9, 1, 6], [2, 5], [8, 1, 1]], 50),
    "trees": ([3, 5, 5, 2], [[3, 9, 1, 6], [2, 5], [8, 1, 1, 8, 8, 8], [4, 4, 0]], 2),
    "chain": ([2], [[1, 2, 3, 4, 5, 6, 30]], 1),
}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 3, "softcap": 2.0, "sinks": True},
}


def segments_of(name):
    prompts, responses, num_distinct = BATCHES[name]
    (micro,) = pack(ragged_batch(prompts, responses, num_distinct=num_distinct), max_tokens=10_000)
    return micro.segments


def inputs(num_rows, *, heads=4, key_heads=2, dim=8, value_dim=8, sinks=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    # strides as the models make them: heads are a view of the last dimension
    q, k = leaf(1, num_rows, heads, dim), leaf(1, num_rows, key_heads, dim)
    v = leaf(1, num_rows, key_heads, value_dim)
    return q, k, v, leaf(heads) if sinks else None


def dense(segments, q, k, v, *, scaling, sliding_window=None, softcap=None, sinks=None):
    """Every score, an explicit mask from each row's path, softmax written out."""
    num_rows = segments[-1].end
    position, allowed = torch.zeros(num_rows), torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for s in segments:
        before = [r for a, b in s.prefix for r in range(a, b)]
        for i, row in enumerate(range(s.start, s.end)):
            position[row] = len(before) + i
            allowed[row, [*before, *range(s.start, row + 1)]] = True
    if sliding_window is not None:
        allowed &= position[:, None] - position < sliding_window
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    scores = q @ k.repeat_interleave(repeats, 0).transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(allowed, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return ((weights / total) @ v.repeat_interleave(repeats, 0)).transpose(0, 1)[None]


def assert_same(run, segments, tensors, options, tolerance=1e-12):
    q, k, v, sinks = tensors
    named = {**options, "sinks": sinks} if sinks is not None else {n: o for n, o in options.items() if n != "sinks"}
    leaves = [t for t in tensors if t is not None]
    results = []
    for function in (run, lambda *a, **o: dense(segments, *a, **o)):
        out = function(q, k, v, scaling=0.7, **named)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for ours, reference in zip(*results, strict=True):
        assert ours.shape == reference.shape
        assert float((ours - reference).norm() / reference.norm()) < tolerance


def through(layout):
    def run(q, k, v, **options):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return layout.attend(torch.nn.Module(), q, k, v, **options)

    return run


@pytest.mark.parametrize("rows", [(64, 256), (3, 2), (1, 1), (1000, 5)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_tiles(name, options, rows):
    segments = segments_of(name)
    plan = TilePlan(segments, CPU, short_rows=rows[0], long_rows=rows[1])
    assert [t.start for t in plan.tiles] == [0, *(t.stop for t in plan.tiles[:-1])]

    def run(q, k, v, **named):
        return tiled_attention(*(t.transpose(1, 2) for t in (q, k, v)), plan, **named)

    tensors = inputs(segments[-1].end, sinks="sinks" in OPTIONS[options])
    assert_same(run, segments, tensors, OPTIONS[options])


@pytest.mark.parametrize("shape", [(4, 4, 8, 8), (6, 1, 4, 4), (4, 2, 8, 3)], ids=str)
def test_head_shapes(shape):
    """No grouping, one key head, and values of another size than keys."""
    heads, key_heads, dim, value_dim = shape
    segments = segments_of("trees")
    tensors = inputs(segments[-1].end, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim)
    assert_same(through(TrainingLayout(segments, CPU)), segments, tensors, {})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_sdpa_per_segment(name, options):
    """Score caps and sinks go to the tiles, the rest through torch's SDPA."""
    segments = segments_of(name)
    tensors = inputs(segments[-1].end, sinks="sinks" in OPTIONS[options])
    assert_same(through(TrainingLayout(segments, CPU, "sdpa")), segments, tensors, OPTIONS[options])


def stand_in(align="bottom-right"):
    """A varlen kernel that reads only what the real ones read: borders and gathered keys."""

    def kernel(q, k, v, plan, scaling, sliding_window, softcap):
        out = []
        borders_q, borders_k = plan.cu_seqlens_q.tolist(), plan.cu_seqlens_k.tolist()
        for i in range(len(borders_q) - 1):
            rows, keys = slice(*borders_q[i : i + 2]), slice(*borders_k[i : i + 2])
            num_rows, num_keys = q[rows].shape[0], k[keys].shape[0]
            assert num_rows <= plan.max_q
            assert num_keys <= plan.max_k
            first = num_keys - num_rows if align == "bottom-right" else 0
            distance = torch.arange(first, first + num_rows)[:, None] - torch.arange(num_keys)
            mask = (distance >= 0) & (distance < (sliding_window or num_keys))
            heads = (t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys]))
            piece = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=scaling, enable_gqa=True
            )
            out.append(piece[0].transpose(0, 1))
        return torch.cat(out)

    return kernel


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_varlen_borders_and_gradients(name, window):
    segments = segments_of(name)

    plan = varlen.VarlenPlan(segments, CPU)

    def run(q, k, v, **options):
        return varlen.varlen_attention(stand_in(), *(t.transpose(1, 2) for t in (q, k, v)), plan, **options)

    tensors = inputs(segments[-1].end)
    assert_same(run, segments, tensors, {"sliding_window": window})


def test_half_precision_keeps_scores_in_float32():
    """Under bfloat16 autocast the error is that of rounding inputs and probabilities, not of the softmax."""
    segments = segments_of("groups")
    q, k, v, _ = inputs(segments[-1].end, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = through(TrainingLayout(segments, CPU))(q, k, v, scaling=0.7)
    assert out.dtype == torch.bfloat16
    exact = dense(segments, q, k, v, scaling=0.7).detach()
    assert float((out.detach() - exact).norm() / exact.norm()) < 8e-3
    out.float().square().sum().backward()
    assert q.grad.dtype == torch.float32


def test_a_kernel_with_another_mask_is_found_out():
    """Versions of varlen kernels align the causal mask top-left; the check before their first use catches it."""

    def raises(*_):
        raise RuntimeError("no kernel image")

    assert what_is_wrong(stand_in(), CPU, torch.bfloat16) is None
    assert what_is_wrong(stand_in("top-left"), CPU, torch.bfloat16).endswith("on a shared prompt")
    assert what_is_wrong(raises, CPU, torch.bfloat16) == "fails here (no kernel image)"


def test_the_choice_of_attention(monkeypatch):
    monkeypatch.setattr(training_layout, "why_not_kernel", lambda name, device: None)
    assert choose_attention(torch.device("cuda"), torch.bfloat16) == "flash"
    monkeypatch.setattr(training_layout, "why_not_kernel", lambda name, device: "is not installed")
    assert choose_attention(torch.device("cuda"), torch.bfloat16) == "sdpa"
    with pytest.raises(ModelError, match=r"model\.attention = flash: flash-attn varlen is not installed; use auto"):
        choose_attention(torch.device("cuda"), torch.bfloat16, "flash")
    assert choose_attention(CPU, torch.float32) == "tiled"
    assert choose_attention(CPU, torch.float32, "sdpa") == "sdpa"
    assert choose_attention(torch.device("cuda"), torch.float32) == "sdpa"
    with pytest.raises(ModelError, match=r"model\.attention = varlen: needs a GPU and run\.dtype = bfloat16"):
        choose_attention(CPU, torch.bfloat16, "varlen")
    with pytest.raises(ModelError, match=r"model\.attention = eager: choose auto, flash, varlen, sdpa, tiled"):
        choose_attention(CPU, torch.float32, "eager")
