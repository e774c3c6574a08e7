"""Calls that reach every batch-level kernel with every launch configuration of the table, on meta tensors."""

from __future__ import annotations

import torch
from head_scenarios import HEAD_SCENARIOS

from fastrl.kernels import launch
from fastrl.kernels.aggregation.kernel import (
    aggregate_backward_triton,
    aggregate_triton,
    aggregation_scale_triton,
    sequence_lengths_triton,
)
from fastrl.kernels.chain_kernel import chain_triton
from fastrl.kernels.clipped_policy_loss.kernel import clipped_policy_loss_triton
from fastrl.kernels.clipped_value_loss.kernel import clipped_value_loss_triton
from fastrl.kernels.discounted_returns.kernel import discounted_returns_triton
from fastrl.kernels.gae.kernel import gae_triton
from fastrl.kernels.group_normalize.kernel import group_normalize_triton
from fastrl.kernels.kl_divergence.kernel import kl_divergence_backward_triton, kl_divergence_triton
from fastrl.kernels.masked_stats.kernel import masked_stats_triton
from fastrl.kernels.mismatch_stats.kernel import mismatch_sums_triton
from fastrl.kernels.pack_weights.kernel import pack_kernel
from fastrl.kernels.whiten.kernel import whiten_triton

INFINITY = float("inf")
LARGE, SMALL, SHORT = (512, 4096), (4096,), (512 * 300,)  # tokens of a batch: padded, little, many short sequences
CLIP, VALUE_CLIP = (0.2, 0.2, 3.0, INFINITY), (0.5, INFINITY)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def mask(shape):
    return meta(*shape, dtype=torch.uint8)


def offsets(sequences=512):
    return meta(sequences + 1, dtype=torch.int32)


def scan():
    x, m = meta(*LARGE), mask(LARGE)
    gae_triton(x, x, m, None, None, None, 0.99, 0.95)
    discounted_returns_triton(x, m, None, 0.99)
    half = meta(*LARGE, dtype=torch.bfloat16)
    gae_triton(half, half, m, None, None, None, 0.99, 0.95)


def scan_short():
    x, m = meta(*SHORT), mask(SHORT)
    gae_triton(x, x, m, None, None, offsets(), 0.99, 0.95)
    gae_triton(x, x, None, meta(512), meta(512), offsets(), 0.99, 0.0)
    discounted_returns_triton(x, m, offsets(), 0.99)


def scan_long():
    x, m = meta(4, 131072), mask((4, 131072))
    gae_triton(x, x, m, None, None, None, 0.99, 0.95)
    discounted_returns_triton(x, m, None, 0.99)


def groups():
    for loo in (False, True):
        group_normalize_triton(meta(16384), meta(16384, dtype=torch.int64), None, True, loo, 1, 1e-6)
    group_normalize_triton(meta(16384), meta(16384, dtype=torch.int32), mask((16384,)), False, False, 1, 1e-6)


def stats():
    masked_stats_triton(meta(*LARGE), mask(LARGE), None, False, 1)
    masked_stats_triton(meta(*SHORT), mask(SHORT), offsets(), True, 1)


def whiten():
    whiten_triton(meta(*LARGE), mask(LARGE), None, None, 1, 1e-8)
    whiten_triton(meta(*SMALL), mask(SMALL), meta(), meta(), 1, 1e-8)


def policy_loss():
    for shape in (LARGE, SMALL):
        x, m = meta(*shape), mask(shape)
        clipped_policy_loss_triton(x, x, x, m, None, None, None, *CLIP, False, True)
        clipped_policy_loss_triton(x, x, x, None, None, None, None, *CLIP, True, True)
    x = meta(*SHORT)
    clipped_policy_loss_triton(x, x, x, mask(SHORT), x, meta(512), offsets(), *CLIP, False, True)


def value_loss():
    for shape in (LARGE, SMALL):
        x, m = meta(*shape), mask(shape)
        clipped_value_loss_triton(x, x, x, m, None, None, None, *VALUE_CLIP, False, True)
        clipped_value_loss_triton(x, x, x, None, None, None, None, *VALUE_CLIP, True, True)


def kl():
    for shape in (LARGE, SMALL):
        x = meta(*shape)
        kl_divergence_triton(x, x, "k3", "k3")
        kl_divergence_backward_triton(x, x, x, "k3")
        chain_triton(x, meta(), meta())
        chain_triton(x, x, None)


def aggregation():
    x, m, small = meta(*LARGE), mask(LARGE), meta(*SMALL)
    lengths = sequence_lengths_triton(x, m, None)
    for mode in ("token-mean", "seq-mean-token-mean", "prompt-mean"):
        aggregation_scale_triton(lengths, meta(512, dtype=torch.int64), None, mode, 1.0, torch.float32)
    for data, rows, cu in ((x, meta(512), None), (meta(*SHORT), meta(512), offsets()), (small, meta(1), None)):
        inside = None if data is small else mask(data.shape)
        aggregate_triton(data, inside, None, rows, cu)
        aggregate_backward_triton(meta(), data, inside, None, rows, cu)


def mismatch():
    x = meta(*LARGE)
    mismatch_sums_triton(x, x, mask(LARGE), None)
    mismatch_sums_triton(meta(*SHORT), meta(*SHORT), mask(SHORT), offsets())


def packing():
    # the wrapper reads addresses, which meta tensors do not have
    bucket = meta(1 << 20, dtype=torch.bfloat16)
    config = launch.config("pack_weights", bucket)
    config.pop("PIECE")
    pack_kernel[(64,)](meta(64, 4, dtype=torch.int64), bucket, **config)


SCENARIOS = {
    f.__name__: f
    for f in (
        scan, scan_short, scan_long, groups, stats, whiten, policy_loss, value_loss, kl, aggregation, mismatch, packing,
    )
} | HEAD_SCENARIOS  # fmt: skip
