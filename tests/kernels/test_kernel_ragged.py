"""Ragged shapes that hypothesis thinks of: lengths, holes, dtypes and offsets of every op with sequences."""

import itertools

import kernel_oracles as oracle
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import TRITON, close, cu, mask_of, normal, offsets_of, poisoned, seen

from fastrl.kernels import aggregate, gae, masked_stats, mismatch_stats

EXAMPLES = settings(
    max_examples=8 if TRITON else 40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
shapes = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 150)), min_size=1, max_size=7)
seeds = st.integers(0, 2**16)
keeps = st.sampled_from([0.0, 0.3, 0.9, 1.0])
kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
offset_kinds = st.sampled_from([torch.int32, torch.int64])


@EXAMPLES
@given(shapes, seeds, keeps, kinds, offset_kinds)
def test_sequences(lengths, seed, keep, dtype, offset_dtype):
    total, offsets = sum(lengths), offsets_of(lengths)
    mask = mask_of(total, seed, keep)
    x, y = (poisoned(normal(total, seed + i) - 1, mask, dtype) for i in (1, 2))
    m, bounds = torch.from_numpy(mask), cu(lengths, offset_dtype)
    got = gae(x, y, m, gamma=0.97, gae_lambda=0.9, cu_seqlens=bounds)
    want = oracle.gae(seen(x), seen(y), mask, offsets, 0.97, 0.9)
    close(got[0], want[0])
    close(got[1], want[1])
    stats = masked_stats(x, m, cu_seqlens=bounds)
    for s in range(len(lengths)):
        part = slice(offsets[s], offsets[s + 1])
        for value, wanted in zip(stats, oracle.stats(seen(x)[part], mask[part]), strict=True):
            close(value[s], wanted)
    counted = [int(mask[a:b].sum()) for a, b in itertools.pairwise(offsets)]
    scale = np.repeat(oracle.scale("seq-mean-token-mean", counted), lengths)
    loss = aggregate(x, m, loss_agg_mode="seq-mean-token-mean", cu_seqlens=bounds)
    close(loss, (seen(x)[mask] * scale[mask]).sum(), factor=5)
    if mask.sum() > 2:
        far = mismatch_stats(x, y, m, cu_seqlens=bounds)
        wanted = oracle.mismatch(seen(x), seen(y), mask, offsets)
        close(far.sequence_k1_max, wanted["sequence_k1_max"], factor=2)
        close(far.ess, wanted["ess"], factor=5)
