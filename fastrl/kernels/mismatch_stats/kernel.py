"""Sums that describe the mismatch of two policies' log-probs in Triton: one pass, one program a sequence.

Without sequences a program takes a stretch of tokens instead. The per-program columns are summed in float64 by torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import launch
from ..checks import check_cu_seqlens_values
from ..device import clip, exp_minus_1_minus, load_float, row_bounds, trained_tokens
from ..dispatch import on_device_of
from ..rows import flat, flat_mask, row_length
from .reference import LIMIT, MAXIMA, SUMS


@triton.jit
def _columns(
    log_prob, rollout, mask, at, start, end, total, limit,
    HAS_MASK: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums and maxima of one block, in the order of SUMS (without sequences) and MAXIMA."""
    t = at + tl.arange(0, BLOCK)
    inside = trained_tokens(mask, t, start, end, total, HAS_MASK, FULL)
    new = tl.where(inside, load_float(log_prob, t, total, FULL), 0.0)
    old = tl.where(inside, load_float(rollout, t, total, FULL), 0.0)
    log_w = clip(new - old, -limit, limit)
    w = tl.where(inside, tl.exp(log_w), 0.0)
    k3 = exp_minus_1_minus(log_w)
    q = tl.where(inside, tl.exp(old), 0.0)
    d = tl.where(inside, tl.exp(new), 0.0) - q
    return (
        tl.sum(inside.to(tl.float32), axis=0),
        tl.sum(log_w, axis=0),
        tl.sum(k3, axis=0),
        tl.sum(w, axis=0),
        tl.sum(w * w, axis=0),
        tl.sum(q, axis=0),
        tl.sum(q * q, axis=0),
        tl.sum(d, axis=0),
        tl.sum(d * d, axis=0),
        tl.sum(q * d, axis=0),
        tl.sum(tl.abs(d), axis=0),
        tl.max(tl.abs(log_w), axis=0),
        tl.max(k3, axis=0),
        tl.max(tl.abs(d), axis=0),
    )


@triton.jit(do_not_specialize=["row_length", "total", "rows"])
def mismatch_kernel(
    log_prob, rollout, mask, sums, maxima, cu_seqlens, row_length, total, rows, limit,
    HAS_MASK: tl.constexpr, RAGGED: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums [13, rows] and maxima [4, rows]."""
    row = tl.program_id(0)
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    first = start // BLOCK
    n, log_w, k3, w, w2, q, q2, d, d2, qd, abs_d = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    top_w, top_k3, top_d = 0.0, 0.0, 0.0
    for i in range(tl.where(end > start, (end - 1) // BLOCK - first + 1, 0)):
        at = (first + i) * BLOCK
        if at + BLOCK <= total:
            n_, log_w_, k3_, w_, w2_, q_, q2_, d_, d2_, qd_, abs_d_, top_w_, top_k3_, top_d_ = _columns(
                log_prob, rollout, mask, at, start, end, total, limit, HAS_MASK, True, BLOCK
            )
        else:
            n_, log_w_, k3_, w_, w2_, q_, q2_, d_, d2_, qd_, abs_d_, top_w_, top_k3_, top_d_ = _columns(
                log_prob, rollout, mask, at, start, end, total, limit, HAS_MASK, False, BLOCK
            )
        n += n_
        log_w += log_w_
        k3 += k3_
        w += w_
        w2 += w2_
        q += q_
        q2 += q2_
        d += d_
        d2 += d2_
        qd += qd_
        abs_d += abs_d_
        top_w = tl.maximum(top_w, top_w_)
        top_k3 = tl.maximum(top_k3, top_k3_)
        top_d = tl.maximum(top_d, top_d_)
    place = sums + row
    tl.store(place, n)
    tl.store(place + rows, log_w)
    tl.store(place + 2 * rows, k3)
    tl.store(place + 3 * rows, w)
    tl.store(place + 4 * rows, w2)
    tl.store(place + 5 * rows, q)
    tl.store(place + 6 * rows, q2)
    tl.store(place + 7 * rows, d)
    tl.store(place + 8 * rows, d2)
    tl.store(place + 9 * rows, qd)
    tl.store(place + 10 * rows, abs_d)
    some = 0.0
    squares = 0.0
    mean = 0.0
    if SEQUENCES:
        some = tl.where(n > 0, 1.0, 0.0)
        # an e^40 fits float32; the sum over sequences is taken in float64
        squares = tl.where(n > 0, tl.exp(2 * clip(log_w, -limit, limit)), 0.0)
        mean = tl.abs(log_w) / tl.maximum(n, 1.0)
    tl.store(place + 11 * rows, some)
    tl.store(place + 12 * rows, squares)
    tl.store(maxima + row, top_w)
    tl.store(maxima + rows + row, top_k3)
    tl.store(maxima + 2 * rows + row, top_d)
    tl.store(maxima + 3 * rows + row, mean)


def mismatch_sums_triton(
    log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as `mismatch_sums_reference`."""
    check_cu_seqlens_values("mismatch_stats", cu_seqlens, log_prob.numel())
    total, device = log_prob.numel(), log_prob.device
    by_sequence = cu_seqlens is not None or log_prob.dim() == 2
    if cu_seqlens is not None:
        rows, length = cu_seqlens.shape[0] - 1, 0
    elif by_sequence:
        rows, length = log_prob.shape[0], row_length(log_prob, None)
    else:
        length = launch.config("mismatch", log_prob)["STRETCH"]
        rows = triton.cdiv(total, length)
    if rows == 0:
        return torch.zeros(len(SUMS), dtype=torch.float64, device=device), torch.zeros(
            len(MAXIMA), dtype=torch.float64, device=device
        )
    config = launch.config("mismatch", log_prob, total // rows)
    config.pop("STRETCH")
    sums = torch.empty(len(SUMS), rows, dtype=torch.float32, device=device)
    maxima = torch.empty(len(MAXIMA), rows, dtype=torch.float32, device=device)
    offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
    with on_device_of(log_prob):
        mismatch_kernel[(rows,)](
            flat(log_prob), flat(rollout_log_prob), flat_mask(mask), sums, maxima, offsets, length, total, rows, LIMIT,
            HAS_MASK=mask is not None, RAGGED=offsets is not None, SEQUENCES=by_sequence, **config,
        )  # fmt: skip
    return sums.to(torch.float64).sum(1), maxima.amax(1).to(torch.float64)
