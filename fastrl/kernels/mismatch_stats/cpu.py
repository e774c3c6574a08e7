"""Sums over tokens and sequences of two policies' log-probs on a CPU, in blocks.

Where log-probs are near each other, w - 1 = expm1(log w) serves for k3, w and d = q (w - 1); else w and p are powers of
two, which torch computes three times as fast as e^x. Tokens are summed in float32 by the hundred, these in float64.
"""

from __future__ import annotations

import math

import torch

from ..aggregation.cpu import sequence_lengths_cpu
from ..checks import check_cu_seqlens_values
from ..cpu_blocks import block_size, blocks, flat_bytes, times
from ..dispatch import accumulate_dtype
from .reference import LIMIT, SUMS, mismatch_sums_reference

LOG2E = 1 / math.log(2)
PIECE = 256  # tokens summed in float32
NEAR = 4.0  # |log w| up to which w - 1 + 1 keeps the digits of w
INSIDE, LOG_W, K3, W, W2, Q, Q2, D, D2, QD, ABS_D = range(len(SUMS) - 2)


def mismatch_sums_cpu(
    log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as `mismatch_sums_reference`."""
    total = log_prob.numel()
    check_cu_seqlens_values("mismatch_stats", cu_seqlens, total)
    dtype = accumulate_dtype(log_prob, rollout_log_prob)
    new, old, marks = log_prob.reshape(-1), rollout_log_prob.reshape(-1), flat_bytes(mask)
    size = -(-min(max(total, 1), block_size()) // PIECE) * PIECE
    columns = torch.zeros((len(SUMS) - 2, size), dtype=dtype, device=log_prob.device)
    log_w = torch.empty(total, dtype=dtype, device=log_prob.device)
    sums, maxima = torch.zeros((2, 13), dtype=torch.float64, device=log_prob.device).unbind(0)
    maxima = maxima[:4].clone()
    for part in blocks(total, size):
        n = part.stop - part.start
        block = columns[:, :n]
        if n < size:
            columns[:, n:].zero_()
        if marks is None:
            block[INSIDE].fill_(1)
        else:
            block[INSIDE].copy_(marks[part])
        most = _fill(block, new[part], old[part], mask is not None)
        log_w[part] = block[LOG_W]
        sums[:11] += columns.view(len(columns), -1, PIECE).sum(2).sum(1, dtype=torch.float64)
        found = torch.stack([block[LOG_W].new_tensor(most), block[K3].amax(), block[ABS_D].amax()])
        torch.maximum(maxima[:3], found, out=maxima[:3])
    if not bool(sums.isfinite().all()):
        return mismatch_sums_reference(log_prob, rollout_log_prob, mask, cu_seqlens)
    if cu_seqlens is not None or log_prob.dim() == 2:
        length, ratio = _per_sequence(log_w, marks, log_prob, cu_seqlens)
        some = length > 0
        squares = torch.where(some, (2 * ratio.clamp(-LIMIT, LIMIT)).exp(), 0.0).sum()
        torch.stack([some.sum().double(), squares], out=sums[11:])
        if length.numel():
            maxima[3] = (ratio.abs() / length.clamp(min=1)).amax()
    return sums, maxima


def _fill(block: torch.Tensor, new: torch.Tensor, old: torch.Tensor, masked: bool) -> float:
    """Fill the columns [11, n] of one block, whose first is there; the largest |log w|."""
    inside = block[INSIDE] if masked else None
    a, q, log_w, k3, w, d = block[D], block[Q], block[LOG_W], block[K3], block[W], block[D]
    times(new, inside, a)
    times(old, inside, q)
    torch.sub(a, q, out=log_w).clamp_(-LIMIT, LIMIT)
    low, high = (float(x) for x in log_w.aminmax())
    most = max(-low, high)
    q.mul_(LOG2E).exp2_()
    torch.expm1(log_w, out=k3)
    if most <= NEAR:
        torch.add(k3, 1, out=w)
    else:
        torch.mul(log_w, LOG2E, out=w).exp2_()
    if masked:
        q.mul_(block[INSIDE])
        w.mul_(block[INSIDE])
    if most <= NEAR:
        torch.mul(q, k3, out=d)
    else:
        a.mul_(LOG2E).exp2_()
        if masked:
            a.mul_(block[INSIDE])
        d.sub_(q)
    k3.sub_(log_w)  # w - 1 - log w loses every digit near 1
    for column, x, y in ((W2, w, w), (Q2, q, q), (D2, d, d), (QD, q, d)):
        torch.mul(x, y, out=block[column])
    torch.abs(d, out=block[ABS_D])
    return most


def _per_sequence(
    log_w: torch.Tensor, marks: torch.Tensor | None, like: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that count and sum of log w of each sequence, float64 [S]."""
    if cu_seqlens is None:
        length = sequence_lengths_cpu(like, None if marks is None else marks.view(like.shape), None).double()
        return length, log_w.view(like.shape).sum(1, dtype=torch.float64)
    inside = torch.ones_like(log_w, dtype=torch.uint8) if marks is None else marks
    offsets = cu_seqlens.long()
    running = torch.zeros((2, log_w.shape[0] + 1), dtype=torch.float64, device=log_w.device)
    torch.cumsum(inside, 0, dtype=torch.float64, out=running[0, 1:])
    torch.cumsum(log_w, 0, dtype=torch.float64, out=running[1, 1:])
    length, ratio = running[:, offsets[1:]] - running[:, offsets[:-1]]
    return length, ratio
