"""The PTX that Triton emits for each kernel, run on CPU tensors: values against float64 loops, accesses in bounds.

Shapes span several blocks of the shipped launch configurations, with partial blocks at both ends.
"""

import itertools
from unittest import mock

import kernel_oracles as oracle
import numpy as np
import ptx_machine
import pytest
import torch
from kernel_cases import TRITON, close, cu, mask_of, normal, offsets_of, poisoned, seen
from kernel_target import on_target

import fastrl.kernels as K
from fastrl.kernels.aggregation.kernel import aggregate_backward_triton
from fastrl.kernels.chain_kernel import chain_triton
from fastrl.kernels.scan_kernel import launch_scan, scan_rows_kernel

pytestmark = pytest.mark.skipif(TRITON, reason="the interpreter process cannot compile")

TARGETS = ["cuda:80", "cuda:90", "cuda:100"]
LENGTHS = [0, 700, 3, 1, 0, 1021, 512, 0]
T, S = sum(LENGTHS), len(LENGTHS)
OFFSETS = offsets_of(LENGTHS)
SEGMENT = np.repeat(np.arange(S), LENGTHS)


def ragged(seed, dtype=torch.float32, keep=0.8):
    mask = mask_of(T, seed, keep)
    return mask, [poisoned(normal(T, seed + i) - 1, mask, dtype) for i in (1, 2, 3)]


def check_scan(target):
    mask, (rewards, values, _) = ragged(1)
    lam, boot = np.linspace(0.5, 1, S), normal(S, 5)
    with on_target(target):
        got = K.gae(
            rewards,
            values,
            torch.from_numpy(mask),
            gamma=0.99,
            gae_lambda=torch.from_numpy(lam).float(),
            bootstrap_values=torch.from_numpy(boot).float(),
            cu_seqlens=cu(LENGTHS),
        )
        back = K.discounted_returns(rewards, torch.from_numpy(mask), gamma=0.97, cu_seqlens=cu(LENGTHS, torch.int64))
    want = oracle.gae(seen(rewards), seen(values), mask, OFFSETS, 0.99, lam, boot)
    close(got[0], want[0])
    close(got[1], want[1])
    close(back, oracle.discounted_returns(seen(rewards), mask, OFFSETS, 0.97))


def check_split_scan(target, total=2 * 2 * 2048 + 777):
    # one long sequence: the maps of chunks, then the chunks
    mask = mask_of(total, 11)
    rewards, values = poisoned(normal(total, 12), mask, torch.bfloat16), poisoned(normal(total, 13), mask)
    with on_target(target) as record:
        got = launch_scan(rewards[None], values[None], torch.from_numpy(mask)[None], None, None, None, 0.99, 0.9)
    assert [entry.kernel for entry in record] == ["scan_chunk_maps_kernel", "scan_chunks_kernel"]
    want = oracle.gae(seen(rewards), seen(values), mask, [0, total], 0.99, 0.9)
    close(got[0][0], want[0])
    close(got[1][0], want[1])


def check_groups(target):
    ids = np.random.default_rng(3).permutation(np.repeat(np.arange(50) * 7 - 20, 3))[:145]
    valid = mask_of(145, 4)
    scores = poisoned(normal(145, 5), valid)
    with on_target(target):
        got = K.group_normalize(
            scores, torch.from_numpy(ids), valid=torch.from_numpy(valid), baseline="leave_one_out", ddof=0
        )
    options = {"scale": "std", "baseline": "leave_one_out", "ddof": 0, "eps": 1e-6}
    close(got, oracle.group_normalize(seen(scores), ids, valid, **options))


def check_stats_and_whiten(target):
    total = 4096 + 2048 + 300
    mask = mask_of(total, 21)
    x = poisoned(normal(total, 22) * 3 + 50, mask)
    with on_target(target):
        overall = K.masked_stats(x, torch.from_numpy(mask))
        each = K.masked_stats(x[:T], torch.from_numpy(mask[:T]), cu_seqlens=cu(LENGTHS))
        white = K.whiten(x, torch.from_numpy(mask))
        given = K.whiten(x.to(torch.bfloat16)[:600], torch.from_numpy(mask[:600]), mean=50.0, var=9.0)
    for value, want in zip(overall, oracle.stats(seen(x), mask), strict=True):
        close(value, want)
    rows = [oracle.stats(seen(x)[a:b], mask[a:b]) for a, b in itertools.pairwise(OFFSETS)]
    for value, want in zip(each, zip(*rows, strict=True), strict=True):
        close(value, want)
    close(white, oracle.whiten(seen(x), mask), factor=2)
    half = seen(x.to(torch.bfloat16))[:600]
    close(given, oracle.whiten(half, mask[:600], mean=50.0, var=9.0))


def check_policy_loss(target):
    mask, (lp, old, adv) = ragged(31)
    m, weights = torch.from_numpy(mask), poisoned(np.abs(normal(T, 36)), mask)
    scale = torch.from_numpy(np.linspace(0.1, 2, S)).float()
    with on_target(target):
        lp.requires_grad_()
        summed = K.clipped_policy_loss(lp, old, adv, m, weights=weights, scale=scale, cu_seqlens=cu(LENGTHS))
        mean = K.clipped_policy_loss(lp.detach(), old, adv, m, dual_clip=None)
        each = K.clipped_policy_loss(lp.detach(), old, adv, m, reduction="none")
        summed.loss.backward()
    rows = np.zeros((8, T))
    for t in np.flatnonzero(mask):
        rows[:, t] = oracle.policy_token(*(seen(x)[t] for x in (lp, old, adv)), 0.2, 0.2, 3.0)
    factor = np.where(mask, seen(weights) * seen(scale)[SEGMENT], 0)
    close(summed.loss, np.where(mask, rows[0] * np.where(mask, factor, 0), 0).sum(), factor=10)
    close(lp.grad, rows[1] * np.where(mask, factor, 0))
    close(summed.stats["clip_high"], rows[2].sum() / mask.sum())
    close(summed.stats["clip_low"], rows[3].sum() / mask.sum())
    close(summed.stats["clip_dual"], rows[4].sum() / mask.sum())
    close(summed.stats["k1"], rows[5].sum() / mask.sum())
    close(summed.stats["k3"] / (rows[6].sum() / mask.sum()), 1.0)
    close(summed.stats["ratio_max"] / rows[7].max(), 1.0)
    plain = [oracle.policy_token(*(seen(x)[t] for x in (lp, old, adv)), 0.2, 0.2)[0] for t in np.flatnonzero(mask)]
    close(mean.loss / (np.sum(plain) / mask.sum()), 1.0)
    close(each.loss, rows[0], factor=2)
    for name, row in zip(each.stats, rows[2:], strict=True):
        close(each.stats[name], row, factor=2)


def check_value_loss(target):
    mask, (v, old, ret) = ragged(41)
    m = torch.from_numpy(mask)
    with on_target(target):
        v.requires_grad_()
        mean = K.clipped_value_loss(v, old, ret, m, value_clip=0.3, huber_delta=1.5)
        each = K.clipped_value_loss(v.detach(), old, ret, m, value_clip=0.3, reduction="none")
        mean.loss.backward()
    rows, square = np.zeros((4, T)), np.zeros((4, T))
    for t in np.flatnonzero(mask):
        rows[:, t] = oracle.value_token(*(seen(x)[t] for x in (v, old, ret)), 0.3, 1.5)
        square[:, t] = oracle.value_token(*(seen(x)[t] for x in (v, old, ret)), 0.3)
    close(mean.loss, rows[0].sum() / mask.sum())
    close(v.grad, rows[1] / mask.sum())
    close(mean.stats["clip"], rows[2].sum() / mask.sum())
    close(mean.stats["abs_error"], rows[3].sum() / mask.sum())
    close(each.loss, square[0])
    close(each.stats["clip"], square[2])


def check_kl(target):
    x = np.concatenate([normal(1000, 51), [0.0, 0.05, 1e-4, 3.5, -3.5, 25.0, -25.0]])
    ref = torch.from_numpy(normal(len(x), 52)).float()
    lp = (ref + torch.from_numpy(x).float()).requires_grad_()
    upstream = normal(len(x), 53)
    upstream[:7] = 0
    for kind in ("k1", "abs", "k2", "k3", "k3+"):
        lp.grad = None
        with on_target(target):
            got = K.kl_divergence(lp, ref, kind=kind)
            got.backward(torch.from_numpy(upstream).float())
        want = np.array([oracle.kl_token(a, kind) for a in seen(lp) - seen(ref)])
        close(got, want[:, 0])
        close(lp.grad, want[:, 1] * upstream)


def check_aggregation(target):
    mask, (token, weights, _) = ragged(61)
    m, ids = torch.from_numpy(mask), torch.tensor([1, 1, 2, 2, 2, 9, 9, 4])
    lengths = [int(mask[a:b].sum()) for a, b in itertools.pairwise(OFFSETS)]
    for mode in ("token-mean", "seq-mean-token-sum-norm", "seq-mean-token-mean", "prompt-mean"):
        scale = oracle.scale(mode, lengths, ids=ids.tolist(), factor=7.0)[SEGMENT]
        factor = np.where(mask, seen(weights) * scale, 0)
        with on_target(target):
            token.grad = None
            got = K.aggregate(
                token.requires_grad_(), m, weights=weights, loss_agg_mode=mode, group_id=ids, loss_scale_factor=7.0,
                cu_seqlens=cu(LENGTHS),
            )  # fmt: skip
            got.backward()
        close(got, (seen(token)[mask] * factor[mask]).sum(), factor=5)
        close(token.grad, factor)
    padded, rows = token.detach()[:2200].reshape(4, 550), torch.tensor([1.0, 2.0, 0.0, -1.0])
    with on_target(target):
        got = K.aggregate(padded, m[:2200].reshape(4, 550), scale=rows)
        slope = aggregate_backward_triton(
            torch.tensor(2.0), padded.to(torch.bfloat16), m[:2200].reshape(4, 550), None, rows, None
        )
        chained = chain_triton(padded, torch.tensor(3.0), torch.tensor(4.0))
    spread = np.where(mask[:2200], np.repeat(seen(rows), 550), 0)
    close(got / 100, np.where(mask[:2200], seen(token)[:2200], 0) @ spread / 100)
    close(slope, 2 * spread.reshape(4, 550))
    close(chained[m[:2200].reshape(4, 550)], seen(token)[:2200][mask[:2200]] * 0.75)


def check_mismatch(target):
    mask, (new, _, _) = ragged(71)
    new = -new.abs()
    old = torch.where(torch.from_numpy(mask), new + torch.from_numpy(normal(T, 75, 0.05)).float(), new)
    with on_target(target):
        got = K.mismatch_stats(new, old, torch.from_numpy(mask), cu_seqlens=cu(LENGTHS))
        flat = K.mismatch_stats(new, old, torch.from_numpy(mask))
    want = oracle.mismatch(seen(new), seen(old), mask, OFFSETS)
    for name, value in want.items():
        close(getattr(got, name) / max(1, abs(value)), value / max(1, abs(value)), factor=2)
    close(flat.k3_mean, want["k3_mean"])


def check_packing(target):
    source = [torch.from_numpy(normal(n, n)).float() for n in (16, 40000, 33, 4096)]
    source[1], source[3] = source[1].to(torch.bfloat16), source[3].to(torch.float16)
    bucket = torch.full((sum(t.numel() for t in source) + 1,), -7.0, dtype=torch.bfloat16)
    with on_target(target, extra=[(f"tensor {i}", t) for i, t in enumerate(source)]) as record:
        K.pack_weights(source, bucket, torch.bfloat16)
    assert torch.equal(bucket[:-1], torch.cat([t.to(torch.bfloat16) for t in source])) and bucket[-1] == -7
    assert record[0].stores[16] >= 0.95 * 2 * 40016


CHECKS = [
    check_scan,
    check_split_scan,
    check_groups,
    check_stats_and_whiten,
    check_policy_loss,
    check_value_loss,
    check_kl,
    check_aggregation,
    check_mismatch,
    check_packing,
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_emitted_code(check, target):
    check(target)


@pytest.mark.slow
def test_the_longest_sequence():
    check_split_scan("cuda:90", total=131072)


def far_memory(start):
    """Buffers whose first element lies `start` elements before the tensor that backs their end."""

    def of(tensors):
        found = []
        for name, t in tensors:
            shift = 0 if name == "cu_seqlens" else start * t.element_size()
            found.append((name, t.data_ptr() + shift, t.numpy().view(np.uint8)))
        return ptx_machine.Memory(found)

    return of


def test_addresses_are_64_bit():
    # a batch of 2^31 + 10245 tokens of which only the end exists
    start, mask = 2**31 + 4 * 2048, np.ones(2053, bool)
    rewards, values = normal(2053, 81).astype(np.float32), normal(2053, 82).astype(np.float32)
    got = [torch.full((2053,), float("nan")) for _ in range(2)]
    offsets = torch.tensor([start, start + 5, start + 2053])
    with on_target("cuda:90"), mock.patch.object(ptx_machine.Memory, "of", far_memory(start)):
        scan_rows_kernel[(2,)](
            torch.from_numpy(rewards), torch.from_numpy(values), None, *got, offsets, None, None, 0, start + 2053,
            0.9, 0.8, HAS_MASK=False, HAS_VALUES=True, RAGGED=True, PER_SEQUENCE=False, BOOTSTRAP=False, ROWS=128,
            num_warps=4,
        )  # fmt: skip
    want = oracle.gae(rewards, values, mask, [0, 5, 2053], 0.9, 0.8)
    close(got[0], want[0])
    close(got[1], want[1])
