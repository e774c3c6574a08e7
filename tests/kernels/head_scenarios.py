"""Calls that reach every row kernel of the head with every launch configuration of the table, on meta tensors."""

from __future__ import annotations

import torch

from fastrl.kernels.log_prob.kernel import gradient_of_rows_triton, statistics_of_rows_triton, weighted_rows_triton
from fastrl.kernels.log_prob.reference import RowOptions, empty_statistics
from fastrl.kernels.scale_kernel import scale_in_place

LARGE, SMALL = 151936, 8192  # columns on both sides of the table's limit
PLAIN, EVERY = RowOptions(), RowOptions(torch.empty(64, device="meta"), 1.0, 0.5, 30.0)


def _case(vocabulary, dtype, want_entropy, want_sum_sq):
    logits = torch.empty((64, vocabulary), dtype=dtype, device="meta")
    return logits, logits.new_empty(64, dtype=torch.int64), empty_statistics(64, logits, want_entropy, want_sum_sq)


def head_statistics():
    for vocabulary in (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            for entropy in (False, True):
                logits, labels, out = _case(vocabulary, dtype, entropy, False)
                statistics_of_rows_triton(logits, labels, PLAIN, out)
    logits, labels, out = _case(LARGE, torch.bfloat16, True, True)
    statistics_of_rows_triton(logits, labels, PLAIN, out)
    statistics_of_rows_triton(logits, labels, EVERY, out)


def head_gradient():
    for vocabulary in (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            for entropy in (False, True):
                logits, labels, out = _case(vocabulary, dtype, True, False)
                g = out.log_prob
                gradient_of_rows_triton(logits, labels, PLAIN, out, g, g if entropy else None, logits)
    logits, labels, out = _case(LARGE, torch.bfloat16, True, False)
    gradient_of_rows_triton(logits, labels, EVERY, out, out.log_prob, out.log_prob, logits)


def head_skewed():
    for dtype in (torch.bfloat16, torch.float32):
        logits, labels, out = _case(50257, dtype, True, False)
        statistics_of_rows_triton(logits, labels, PLAIN, out)
        gradient_of_rows_triton(logits, labels, PLAIN, out, out.log_prob, None, logits)


def head_weighted():
    for vocabulary in (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            logits, labels, out = _case(vocabulary, dtype, False, False)
            weighted_rows_triton(logits, labels, PLAIN, out.row_max, out.log_prob)
    logits, labels, out = _case(LARGE, torch.bfloat16, False, False)
    weighted_rows_triton(logits, labels, EVERY, out.row_max, out.log_prob)


def head_scaling():
    for dtype in (torch.bfloat16, torch.float32):
        scale_in_place(torch.empty((4096, 4096), dtype=dtype, device="meta"), torch.empty((), device="meta"))


HEAD_SCENARIOS = {f.__name__: f for f in (head_scaling, head_statistics, head_gradient, head_skewed, head_weighted)}
