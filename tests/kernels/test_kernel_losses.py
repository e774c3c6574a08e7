"""clipped_policy_loss, clipped_value_loss, kl_divergence and aggregation against float64 loops, with gradients."""

import itertools

import kernel_oracles as oracle
import numpy as np
import pytest
import torch
from kernel_cases import LENGTHS, TRITON, close, cu, mask_of, normal, offsets_of, poisoned, seen

from fastrl.kernels import aggregate, aggregation_scale, clipped_policy_loss, clipped_value_loss, kl_divergence
from fastrl.kernels.aggregation.reference import MODES

T, S = sum(LENGTHS), len(LENGTHS)
OFFSETS = offsets_of(LENGTHS)
SEGMENT = np.repeat(np.arange(S), LENGTHS)
GROUPS = np.array([4, 4, 9, 9, 9, 4, 1, 1, 2])


def policy_case(seed, dtype=torch.float32):
    """Log-probs whose ratios reach every branch, advantages with a zero, garbage outside the mask."""
    mask = mask_of(T, seed)
    lp, adv = normal(T, seed + 1) - 2, normal(T, seed + 3)
    old = lp + normal(T, seed + 2, 0.8)
    keep = np.flatnonzero(mask)
    adv[keep[0]] = 0.0
    old[keep[1]], old[keep[2]] = lp[keep[1]] + 150, lp[keep[2]] - 150  # beyond the clamp, both sides
    return [poisoned(v, mask, dtype) for v in (lp, old, adv)], mask


def policy_oracle(data, mask, weights=None, **options):
    rows = np.zeros((8, len(mask)))
    for t in np.flatnonzero(mask):
        rows[:, t] = oracle.policy_token(*(seen(x)[t] for x in data), **options)
    if weights is not None:
        rows[:2] *= np.where(mask, weights, 0)
    return rows


def value_oracle(data, mask, **options):
    rows = np.zeros((4, len(mask)))
    for t in np.flatnonzero(mask):
        rows[:, t] = oracle.value_token(*(seen(x)[t] for x in data), **options)
    return rows


def scale_of(mode, mask, **counts):
    lengths = [int(mask[a:b].sum()) for a, b in itertools.pairwise(OFFSETS)]
    return oracle.scale(mode, lengths, ids=GROUPS, factor=37.0, **counts)


OPTIONS = [
    {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    {"clip_low": 0.1, "clip_high": 0.0, "dual_clip": None},
    {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5, "max_ratio": 1.7},
]
COUNTS = {"num_tokens": 1000, "num_sequences": torch.tensor(50), "num_prompts": 6.0}


@pytest.mark.parametrize("options", OPTIONS)
def test_policy_tokens(options):
    data, mask = policy_case(100)
    lp = data[0].requires_grad_()
    weights = np.abs(normal(T, 7))
    got = clipped_policy_loss(
        lp, *data[1:], torch.from_numpy(mask), weights=poisoned(weights, mask), reduction="none", **options
    )
    want = policy_oracle(data, mask, weights, **options)
    close(got.loss, want[0])
    names = ("clip_high", "clip_low", "clip_dual", "k1", "k3", "ratio")
    assert tuple(got.stats) == names
    for name, row in zip(names, want[2:], strict=True):
        close(got.stats[name], row, factor=2)
    assert want[2:5].sum(1).min() > 0 or options["dual_clip"] is None  # the case reaches every branch
    upstream = normal(T, 8)
    got.loss.backward(torch.from_numpy(upstream).float())
    close(lp.grad, want[1] * upstream)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [{}, COUNTS])
def test_policy_sum_every_mode(mode, counts):
    data, mask = policy_case(200)
    lp = data[0].requires_grad_()
    got = clipped_policy_loss(
        lp,
        *data[1:],
        torch.from_numpy(mask),
        loss_agg_mode=mode,
        cu_seqlens=cu(LENGTHS),
        group_id=torch.from_numpy(GROUPS),
        loss_scale_factor=37.0,
        **counts,
    )
    want = policy_oracle(data, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    scale = scale_of(mode, mask, **{k: float(v) for k, v in counts.items()})[SEGMENT]
    close(got.loss, (want[0] * scale).sum(), factor=5)
    (got.loss * 3).backward()
    close(lp.grad, want[1] * scale * 3)
    for name, row in zip(("clip_high", "clip_low", "clip_dual", "k1"), want[2:6], strict=True):
        close(got.stats[name], row.sum() / mask.sum())
    assert got.stats["num_tokens"] == mask.sum()
    close(got.stats["ratio_max"] / want[7].max(), 1.0)


def test_policy_padded_scale_and_half():
    data, mask = policy_case(300, torch.bfloat16)
    rows = slice(0, 248)
    padded = [x[rows].reshape(8, 31).t().contiguous().t() for x in data]
    padded[0].requires_grad_()
    scale = np.linspace(0.1, 2, 8)
    got = clipped_policy_loss(
        *padded, torch.from_numpy(mask[rows]).reshape(8, 31), scale=torch.from_numpy(scale).float()
    )
    want = policy_oracle([x[rows] for x in data], mask[rows], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    spread = np.repeat(scale, 31)
    close(got.loss / (want[0] * spread).sum(), 1.0)
    got.loss.backward()
    assert padded[0].grad.dtype == torch.bfloat16
    close(padded[0].grad, (want[1] * spread).reshape(8, 31), torch.bfloat16)


@pytest.mark.parametrize("total", [0, 5])
def test_an_all_masked_batch_is_zero(total):
    x = torch.full((total,), float("nan"), requires_grad=True)
    none = torch.zeros(total, dtype=torch.bool)
    for mode in MODES:
        ids, offsets = torch.zeros(1, dtype=torch.int64), torch.tensor([0, total])
        common = {"loss_agg_mode": mode, "cu_seqlens": offsets, "group_id": ids, "loss_scale_factor": 3.0}
        for loss in (
            clipped_policy_loss(x, x.detach(), x.detach(), none, **common).loss,
            clipped_value_loss(x, x.detach(), x.detach(), none, **common).loss,
            aggregate(x, none, **common),
        ):
            x.grad = None
            assert loss.item() == 0
            loss.backward()
            assert x.grad is not None and not x.grad.any()


def test_masked_nan_in_the_losses_without_a_mask_argument():
    # the training step hands token losses to aggregate: the NaN at masked places must not come back as a gradient
    mask = torch.tensor([1, 0, 1, 0])
    lp = torch.tensor([-1.0, float("nan"), -2.0, float("-inf")], requires_grad=True)
    other = torch.tensor([-1.1, -1.0, (-1.7), float("nan")])
    token = clipped_policy_loss(lp, other, torch.ones(4), reduction="none").loss
    loss = aggregate(token + 0.1 * kl_divergence(lp, other), mask)
    loss.backward()
    assert loss.isfinite() and lp.grad.isfinite().all()
    assert lp.grad[1] == lp.grad[3] == 0 and lp.grad[0] != 0


@pytest.mark.parametrize(
    "options",
    [{"value_clip": 0.5}, {"value_clip": None}, {"value_clip": 0.2, "huber_delta": 0.7}],
)
def test_values(options):
    mask = mask_of(T, 400)
    data = [poisoned(normal(T, 401 + i), mask) for i in range(3)]
    v = data[0].requires_grad_()
    want = value_oracle(data, mask, **options)
    got = clipped_value_loss(v, *data[1:], torch.from_numpy(mask), reduction="none", **options)
    close(got.loss, want[0])
    close(got.stats["clip"], want[2])
    close(got.stats["abs_error"], want[3])
    for mode in MODES:
        v.grad = None
        got = clipped_value_loss(
            v,
            *data[1:],
            torch.from_numpy(mask),
            loss_agg_mode=mode,
            cu_seqlens=cu(LENGTHS),
            group_id=torch.from_numpy(GROUPS),
            loss_scale_factor=37.0,
            **options,
        )
        scale = scale_of(mode, mask)[SEGMENT]
        close(got.loss, (want[0] * scale).sum(), factor=5)
        got.loss.backward()
        close(v.grad, want[1] * scale)
        close(got.stats["abs_error"], want[3].sum() / mask.sum())
        close(got.stats["clip"], want[2].sum() / mask.sum())


@pytest.mark.parametrize("kind", ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "k3+", "abs+"])
def test_kl(kind):
    x = np.concatenate([normal(45, 500), [0.0, 3.5, -3.5, 25.0, -25.0]])
    lp = torch.from_numpy(normal(50, 501)).float()
    ref = (lp - torch.from_numpy(x).float()).requires_grad_()
    lp.requires_grad_()
    want = np.array([oracle.kl_token(a, kind) for a in (seen(lp) - seen(ref))])
    got = kl_divergence(lp, ref, kind=kind)
    close(got, want[:, 0])
    upstream = normal(50, 502)
    got.backward(torch.from_numpy(upstream).float())
    close(lp.grad, want[:, 1] * upstream)
    close(ref.grad, -want[:, 1] * upstream)


@pytest.mark.parametrize("mode", MODES)
def test_aggregate(mode):
    mask = mask_of(T, 600)
    token = poisoned(normal(T, 601), mask).requires_grad_()
    weights = normal(T, 602)
    for counts in ({}, COUNTS):
        token.grad = None
        got = aggregate(
            token,
            torch.from_numpy(mask),
            weights=torch.from_numpy(weights).float(),
            loss_agg_mode=mode,
            cu_seqlens=cu(LENGTHS, torch.int64),
            group_id=torch.from_numpy(GROUPS),
            loss_scale_factor=37.0,
            **counts,
        )
        scale = scale_of(mode, mask, **{k: float(v) for k, v in counts.items()})
        factor = np.where(mask, weights * scale[SEGMENT], 0)
        close(got, (seen(token)[mask] * factor[mask]).sum(), factor=5)
        got.backward()
        close(token.grad, factor)
    lengths = [int(mask[a:b].sum()) for a, b in itertools.pairwise(OFFSETS)]
    got = aggregation_scale(
        mode, torch.tensor(lengths), group_id=torch.from_numpy(GROUPS), loss_scale_factor=37.0, dtype=torch.float32
    )
    close(got, scale_of(mode, mask))


def test_aggregate_layouts():
    x = torch.arange(12.0).reshape(3, 4)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    close(aggregate(x, mask), (0 + 1 + 8 + 9 + 10 + 11) / 6)
    close(aggregate(x, mask, loss_agg_mode="seq-mean-token-mean"), (0.5 + 9.5) / 2)
    close(aggregate(x[0]), 1.5)
    close(aggregate(x, mask, scale=torch.tensor([1.0, 5.0, 0.5])), 1 + 19)
    close(aggregate(x, mask, num_tokens=100), 0.39)


@pytest.mark.skipif(TRITON, reason="float64 always takes the reference")
def test_float64_and_gradcheck():
    lp, old = torch.from_numpy(normal(9, 701)).requires_grad_(), torch.from_numpy(normal(9, 702))
    adv, mask, offsets = torch.from_numpy(normal(9, 703)), torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1]), cu([4, 0, 5])
    for mode in ("token-mean", "seq-mean-token-mean"):
        common = {"loss_agg_mode": mode, "cu_seqlens": offsets}
        assert clipped_policy_loss(lp, old, adv, mask, **common).loss.dtype == torch.float64
        torch.autograd.gradcheck(lambda x, c=common: clipped_policy_loss(x, old, adv, mask, **c).loss, lp)
        torch.autograd.gradcheck(lambda x, c=common: clipped_value_loss(x, old, adv, mask, **c).loss, lp)
        torch.autograd.gradcheck(lambda x, c=common: aggregate(x, mask, **c), lp)
    torch.autograd.gradcheck(lambda x: clipped_policy_loss(x, old, adv, mask, reduction="none").loss, lp)
    for kind in ("k1", "abs", "k2", "k3"):
        torch.autograd.gradcheck(lambda x, y, k=kind: kl_divergence(x, y, kind=k), (lp, old.clone().requires_grad_()))
    want = policy_oracle([lp, old, adv], mask.numpy(), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    close(clipped_policy_loss(lp, old, adv, mask).loss, want[0].sum() / 7, torch.float64)


@pytest.mark.parametrize("function", [clipped_policy_loss, clipped_value_loss])
def test_a_second_derivative_is_refused(function):
    x = torch.zeros(3, requires_grad=True)
    loss = function(x, torch.zeros(3), torch.ones(3)).loss
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative is not available"):
        first.sum().backward()
    y = torch.zeros(3, requires_grad=True)
    (first,) = torch.autograd.grad(kl_divergence(y, torch.ones(3)).sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="kl_divergence: the second derivative"):
        first.sum().backward()


def test_loss_arguments_are_named():
    x, cases = torch.zeros(4), [
        ({"clip_low": 1.0}, r"clip_low = 1.0: a finite number in \[0, 1\)"),
        ({"clip_low": -0.1}, "clip_low = -0.1"),
        ({"clip_high": float("nan")}, "clip_high = nan"),
        ({"dual_clip": 1.0}, r"dual_clip = 1.0: a finite number in \(1, inf\)"),
        ({"max_ratio": 1.1}, r"max_ratio = 1.1: a finite number in \[1.2, inf\)"),
        ({"reduction": "mean"}, "reduction = 'mean': use one of sum, none"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode = 'mean': use one of token-mean"),
        ({"loss_agg_mode": "seq-mean-token-mean"}, r"give \[T\] with cu_seqlens"),
        ({"num_tokens": -3}, "num_tokens = -3: a count >= 0"),
        ({"scale": torch.ones(3), "cu_seqlens": torch.tensor([0, 4])}, r"scale has shape \[3\]: \[1\] is needed"),
        ({"weights": torch.ones(3)}, r"weights has shape \[3\]"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "cu_seqlens": torch.tensor([0, 4])}, "loss_scale_factor = None"),
        ({"loss_agg_mode": "prompt-mean", "cu_seqlens": torch.tensor([0, 4])}, "group_id = None"),
    ]  # fmt: skip
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            clipped_policy_loss(x, x, x, **change)
    with pytest.raises(ValueError, match="value_clip = 0"):
        clipped_value_loss(x, x, x, value_clip=0)
    with pytest.raises(ValueError, match="kind = 'k4': use one of k1"):
        kl_divergence(x, x, kind="k4")
    with pytest.raises(ValueError, match="whole distribution"):
        kl_divergence(x, x, kind="full")
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\] = 3"):
        aggregate(x, cu_seqlens=torch.tensor([0, 3]), loss_agg_mode="seq-mean-token-mean")
