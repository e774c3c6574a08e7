"""Sums over tokens and sequences that describe how far two policies' log-probs are apart, in plain torch.

log w = clamp(log_prob - rollout_log_prob, -20, 20), p = exp(log_prob), q = exp(rollout_log_prob), d = p - q.
"""

from __future__ import annotations

import torch

from ..checks import check_cu_seqlens_values
from ..dispatch import accumulate_dtype
from ..ragged import bool_mask, offsets_of, segment_sum

LIMIT = 20.0
# additive over tokens, sequences and ranks
SUMS = ("tokens", "log_w", "k3", "w", "w2", "q", "q2", "d", "d2", "qd", "abs_d", "sequences", "sequence_w2")
# combined by max
MAXIMA = ("abs_log_w", "k3", "abs_d", "abs_sequence_log_w")


def _per_sequence(x: torch.Tensor, like: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """float64 sums [S] of flat `x`."""
    if cu_seqlens is None:
        return x.reshape(like.shape).sum(1, dtype=torch.float64)
    return segment_sum(x.to(torch.float64), offsets_of(like, cu_seqlens))


def mismatch_sums_reference(
    log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums [13], maxima [4]) in float64. A 1-D tensor without cu_seqlens has no sequences: their entries are 0."""
    check_cu_seqlens_values("mismatch_stats", cu_seqlens, log_prob.numel())
    dtype = accumulate_dtype(log_prob, rollout_log_prob)
    inside = bool_mask(mask, log_prob)
    zero = torch.zeros((), dtype=dtype, device=log_prob.device)
    new = torch.where(inside, log_prob.reshape(-1).to(dtype), zero)
    old = torch.where(inside, rollout_log_prob.reshape(-1).to(dtype), zero)
    log_w = (new - old).clamp(-LIMIT, LIMIT)
    w = log_w.exp()
    k3 = torch.expm1(log_w) - log_w  # w - 1 - log w loses every digit near 1
    q = torch.where(inside, old.exp(), zero)
    d = torch.where(inside, new.exp(), zero) - q
    w = torch.where(inside, w, zero)
    columns = (inside, log_w, k3, w, w * w, q, q * q, d, d * d, q * d, d.abs())
    token_sums = torch.stack([x.sum(dtype=torch.float64) for x in columns])
    largest = [x.amax() if x.numel() else zero for x in (log_w.abs(), k3, d.abs())]
    token_max = torch.stack(largest).to(torch.float64)
    if cu_seqlens is None and log_prob.dim() != 2:
        return torch.cat([token_sums, token_sums.new_zeros(2)]), torch.cat([token_max, token_max.new_zeros(1)])
    length, total = (_per_sequence(x, log_prob, cu_seqlens) for x in (inside, log_w))
    squares = torch.where(length > 0, (2 * total.clamp(-LIMIT, LIMIT)).exp(), torch.zeros_like(total)).sum()
    mean = torch.cat([total.abs() / length.clamp(min=1), total.new_zeros(1)]).amax()
    sequence_sums = torch.stack([(length > 0).sum().to(torch.float64), squares])
    return torch.cat([token_sums, sequence_sums]), torch.cat([token_max, mean.reshape(1)])
