"""How far the trainer's log-probs are from those the engine sampled with: every metric from one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..checks import check_layout, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .cpu import mismatch_sums_cpu
from .reference import MAXIMA, SUMS, mismatch_sums_reference


class MismatchStats(NamedTuple):
    """Metrics of log w = clamp(log_prob - rollout_log_prob, -20, 20) over the mask, scalars; see `mismatch_stats`.

    `sums` add up and `maxima` take the maximum over ranks or micro-batches; `MismatchStats.of` makes metrics of them.
    """

    num_tokens: torch.Tensor
    k1_mean: torch.Tensor
    k1_max: torch.Tensor
    k3_mean: torch.Tensor
    k3_max: torch.Tensor
    ppl_ratio: torch.Tensor
    chi2: torch.Tensor
    ess: torch.Tensor
    pearson: torch.Tensor
    prob_diff_mean: torch.Tensor
    prob_diff_max: torch.Tensor
    sequence_chi2: torch.Tensor
    sequence_k1_max: torch.Tensor
    sums: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def of(cls, sums: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype = torch.float32) -> MismatchStats:
        """The metrics of (reduced) `sums` [13] and `maxima` [4]; without a token: no mismatch at all."""
        s = dict(zip(SUMS, sums.to(torch.float64).unbind(0), strict=True))
        m = dict(zip(MAXIMA, maxima.to(torch.float64).unbind(0), strict=True))
        n = s["tokens"].clamp(min=1)
        some = s["tokens"] > 0
        one, zero = torch.ones_like(n), torch.zeros_like(n)
        mean_q, mean_d = s["q"] / n, s["d"] / n
        var_q = (s["q2"] / n - mean_q * mean_q).clamp(min=0)
        var_d = (s["d2"] / n - mean_d * mean_d).clamp(min=0)
        cov_qd = s["qd"] / n - mean_q * mean_d
        var_p = (var_q + 2 * cov_qd + var_d).clamp(min=0)
        product = var_q * var_p
        spread = product > 0
        correlation = (var_q + cov_qd) / torch.where(spread, product, one).sqrt()
        pearson = torch.where(spread, correlation.clamp(-1, 1), torch.where(s["d2"] == 0, one, zero))
        values = {
            "num_tokens": s["tokens"],
            "k1_mean": s["log_w"] / n,
            "k1_max": m["abs_log_w"],
            "k3_mean": s["k3"] / n,
            "k3_max": m["k3"],
            "ppl_ratio": (-s["log_w"] / n).exp(),
            "chi2": torch.where(some, s["w2"] / n - 1, zero),
            "ess": torch.where(some, s["w"] * s["w"] / (n * torch.where(some, s["w2"], one)), one),
            "pearson": pearson,
            "prob_diff_mean": s["abs_d"] / n,
            "prob_diff_max": m["abs_d"],
            "sequence_chi2": torch.where(s["sequences"] > 0, s["sequence_w2"] / s["sequences"].clamp(min=1) - 1, zero),
            "sequence_k1_max": m["abs_sequence_log_w"],
        }
        made = torch.stack(list(values.values())).to(dtype).unbind(0)
        return cls(**dict(zip(values, made, strict=True)), sums=sums, maxima=maxima)


def _fake(
    log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        log_prob.new_empty(len(SUMS), dtype=torch.float64),
        log_prob.new_empty(len(MAXIMA), dtype=torch.float64),
    )


_op = define_op(
    "mismatch_sums",
    "(Tensor log_prob, Tensor rollout_log_prob, Tensor? mask, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    reference=mismatch_sums_reference,
    cpu=mismatch_sums_cpu,
    kernel="fastrl.kernels.mismatch_stats.kernel:mismatch_sums_triton",
    fake=_fake,
)


def mismatch_stats(
    log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> MismatchStats:
    """Every engine / trainer mismatch metric over the mask.

        log w = clamp(log_prob - rollout_log_prob, -20, 20),  p = exp log_prob,  q = exp rollout_log_prob
        k1 = log w (max of |k1|)      k3 = w - 1 - log w       ppl_ratio = exp(-mean log w)
        chi2 = mean w^2 - 1           ess = (sum w)^2 / (n sum w^2)
        pearson = corr(p, q)          prob_diff = |p - q|
        sequence_chi2 = mean_s exp(2 sum_t log w) - 1 (sum clamped too),  sequence_k1_max = max_s |mean_t log w|

    Data, not a loss: no gradient flows. The two sequence metrics are 0 for a 1-D tensor without cu_seqlens.

    Args:
        log_prob: [T] or [B, T] float, of the trainer's policy.
        rollout_log_prob: like log_prob, of the engine.
        mask: like log_prob, nonzero where the token counts; None: everywhere.
        cu_seqlens: [S+1] int32 or int64 offsets of the ragged layout.

    Returns:
        MismatchStats of scalars, float32 (float64 if an input is).

    Raises:
        ValueError: a shape, dtype or device that is not allowed.
    """
    check_tensor("mismatch_stats", "log_prob", log_prob)
    check_tensor("mismatch_stats", "rollout_log_prob", rollout_log_prob, shape=log_prob.shape, device=log_prob.device)
    check_mask("mismatch_stats", mask, log_prob)
    if cu_seqlens is not None:
        check_layout("mismatch_stats", "log_prob", log_prob, cu_seqlens)
    sums, maxima = _op(log_prob.detach(), rollout_log_prob.detach(), mask, cu_seqlens)
    return MismatchStats.of(sums, maxima, accumulate_dtype(log_prob, rollout_log_prob))
