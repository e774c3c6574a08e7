"""mismatch_stats and pack_weights against float64 loops and torch's own cast."""

import kernel_oracles as oracle
import numpy as np
import pytest
import torch
from kernel_cases import LENGTHS, close, cu, mask_of, normal, offsets_of, poisoned, seen

from fastrl.kernels import MismatchStats, mismatch_stats, pack_weights

T = sum(LENGTHS)


def case(seed, spread=0.1):
    mask = mask_of(T, seed)
    new = -np.abs(normal(T, seed + 1))
    old = np.minimum(new + normal(T, seed + 2, spread), -1e-3)
    return poisoned(new, mask), poisoned(old, mask), mask


@pytest.mark.parametrize("spread", [1e-3, 0.1, 2.0])
def test_metrics_equal_the_loop(spread):
    new, old, mask = case(10, spread)
    got = mismatch_stats(new, old, torch.from_numpy(mask), cu_seqlens=cu(LENGTHS))
    want = oracle.mismatch(seen(new), seen(old), mask, offsets_of(LENGTHS))
    for name, value in want.items():
        # differences of nearly equal float32 numbers: absolute error of the log-probs' own rounding
        close(getattr(got, name) / max(1.0, abs(value)), value / max(1.0, abs(value)), factor=2)


def test_no_sequences_padded_rows_and_nothing():
    new, old, mask = case(20)
    got = mismatch_stats(new, old, torch.from_numpy(mask))
    want = oracle.mismatch(seen(new), seen(old), mask, None)
    close(got.k3_mean, want["k3_mean"])
    assert got.sequence_chi2 == got.sequence_k1_max == 0
    rows = [x[:248].reshape(8, 31) for x in (new, old, torch.from_numpy(mask))]
    got = mismatch_stats(*rows)
    want = oracle.mismatch(seen(new)[:248], seen(old)[:248], mask[:248], offsets_of([31] * 8))
    close(got.sequence_k1_max, want["sequence_k1_max"])
    close(got.sequence_chi2 / want["sequence_chi2"], 1.0)
    for nothing in (mismatch_stats(new[:0], old[:0]), mismatch_stats(new, old, torch.zeros(T))):
        values = dict(zip(MismatchStats._fields, nothing, strict=True))
        assert values["ppl_ratio"] == values["ess"] == values["pearson"] == 1
        assert values["num_tokens"] == values["chi2"] == values["k1_max"] == values["k3_mean"] == 0


def test_sums_add_up_over_parts():
    new, old, mask = case(30)
    m = torch.from_numpy(mask)
    whole = mismatch_stats(new, old, m)
    parts = [mismatch_stats(new[a:b], old[a:b], m[a:b]) for a, b in ((0, 100), (100, 101), (101, T))]
    merged = MismatchStats.of(
        torch.stack([p.sums for p in parts]).sum(0), torch.stack([p.maxima for p in parts]).amax(0)
    )
    for name in MismatchStats._fields[:-2]:
        close(getattr(merged, name), getattr(whole, name).item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pack_weights(dtype):
    source = [
        torch.from_numpy(normal(33, 1).reshape(3, 11)).float(),
        torch.zeros(0),
        torch.from_numpy(normal(12, 2).reshape(3, 4)).to(torch.bfloat16).t(),
        torch.from_numpy(normal(1030, 3)).to(torch.float16),
        torch.tensor(3.25),
    ]
    total = sum(t.numel() for t in source)
    bucket = torch.full((total + 5,), -7.0, dtype=dtype)
    views = pack_weights(source, bucket, dtype)
    want = torch.cat([t.reshape(-1).to(dtype) for t in source])
    assert torch.equal(bucket[:total], want)
    assert (bucket[total:] == -7).all()
    for view, t in zip(views, source, strict=True):
        assert (
            torch.equal(view, t.to(dtype)) and view.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
        )
    raw = torch.zeros((total + 1) * bucket.element_size(), dtype=torch.uint8)
    pack_weights(source, raw, dtype)
    assert torch.equal(raw.view(dtype)[:total], want)
    assert pack_weights([], raw, dtype) == []


def test_pack_arguments_are_named():
    with pytest.raises(ValueError, match=r"out holds 3 values of torch.float32: 4 are needed"):
        pack_weights([torch.ones(4)], torch.zeros(3), torch.float32)
    with pytest.raises(ValueError, match="out has dtype float32"):
        pack_weights([torch.ones(4)], torch.zeros(9), torch.bfloat16)
    with pytest.raises(ValueError, match=r"tensors\[0\] has dtype int64"):
        pack_weights([torch.ones(4, dtype=torch.int64)], torch.zeros(9), torch.float32)
    with pytest.raises(ValueError, match=r"dtype = torch\.int8"):
        pack_weights([torch.ones(4)], torch.zeros(9), torch.int8)
