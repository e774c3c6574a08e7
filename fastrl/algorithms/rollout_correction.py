"""Correction for sampling with an engine (or an older policy) that differs from the trainer's policy before the update.

    log w_t = old_log_prob - rollout_log_prob,  clamped to +-20, detached
    level token: each token's own;  sequence: the sum over the response's sampled tokens;  geometric: the mean
    form truncate: min(w, cap);  mask: w inside [low, high], 0 outside

A token without an engine log-prob (NaN) gets weight 1 and is counted. Rejection takes tokens out of the loss before the
normalisers are counted. https://fengyao.notion.site/off-policy-rl https://arxiv.org/abs/2510.18855
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fastrl.algorithms.ragged import sequence_mean, sequence_sum, spread, zero_masked
from fastrl.algorithms.registry import add, make_entry
from fastrl.algorithms.rejection import all_kept, kept, off_policy_kept, parse_rule, rejection_stats

MAX_LOG_WEIGHT = 20.0
Counted = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count)


@dataclass(frozen=True)
class Correction:
    """What a correction decided. The loss of a token is multiplied by `weight`; `keep` is the new loss mask."""

    weight: Tensor | None  # [T] float, detached, 1 where nothing is corrected; None: no weights asked for
    keep: Tensor  # [T] bool, response_mask without the rejected tokens
    stats: Counted = field(default_factory=dict)


def rollout_correction(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    advantages: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    *,
    level: Literal["token", "sequence", "geometric", "none"] = "token",
    form: Literal["truncate", "mask"] = "truncate",
    cap: float = 2.0,
    low: float = 0.5,
    high: float = 5.0,
    batch_normalize: bool = False,
    rejection: list[dict[str, Any]] | None = None,
    outlier_low: float | None = None,
    outlier_high: float | None = None,
    off_policy_delta: float | None = None,
) -> Correction:
    """Weights and rejections of the tokens of a rollout batch (or of any part of it, at level token without rejection).

    Args:
        old_log_prob, rollout_log_prob: [T] float; response_mask: [T] bool; advantages: [T] float, for off_policy_delta.
        cu_seqlens: [S+1]; may be None at level token without rejections.
        reduce: sums a tensor over ranks, for batch_normalize; None when there is one.
        cap: largest weight of form truncate. low, high: where form mask keeps weights, as ratios.
        batch_normalize: divide the weights by their mean over response_mask of the whole rollout batch.
        rejection: rules {statistic: k1 | k2 | k3, level: token | seq_sum | seq_mean | seq_max, lower, upper}, all of
            which must pass.
        outlier_low, outlier_high: a sequence with one token's ratio outside is rejected.
        off_policy_delta: a sequence with negative advantage is rejected when mean(rollout - old) is above it, in nats.
    """
    mask = response_mask.bool()
    known = mask & torch.isfinite(rollout_log_prob)
    log_weight = log_weights(old_log_prob, rollout_log_prob, known)
    stats: Counted = {"tokens_without_log_prob": ((mask & ~known).double().sum(), mask.double().sum())}
    weight = None
    if level != "none":
        weight, more = weights(log_weight, mask, known, cu_seqlens, level=level, form=form, cap=cap, low=low, high=high)
        stats |= more
        if batch_normalize:
            weight = normalized(weight, mask, reduce)
    keeps: dict[str, Tensor] = {}
    rules = list(rejection or [])
    if outlier_low is not None or outlier_high is not None:
        rules.append({"statistic": "k1", "level": "seq_max", "lower": outlier_low, "upper": outlier_high})
    for rule in map(parse_rule, rules):
        keeps[rule.name] = kept(rule, log_weight, mask, need_borders(cu_seqlens))
    if off_policy_delta is not None:
        if advantages is None:
            raise ValueError("off_policy_delta needs advantages")
        keeps["off_policy"] = off_policy_kept(
            log_weight, advantages, mask, need_borders(cu_seqlens), delta=off_policy_delta
        )
    for name, keep in keeps.items():
        stats |= rejection_stats(keep, mask, need_borders(cu_seqlens), name)
    return Correction(weight, mask & all_kept(*keeps.values()) if keeps else mask, stats)


def log_weights(old_log_prob: Tensor, rollout_log_prob: Tensor, known: Tensor) -> Tensor:
    """clamp(old - rollout, -20, 20) where both are known, 0 elsewhere: [T], detached."""
    difference = zero_masked(old_log_prob.detach(), known) - zero_masked(rollout_log_prob.detach(), known)
    return difference.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)


def weights(
    log_weight: Tensor,
    mask: Tensor,
    known: Tensor,
    cu_seqlens: Tensor | None,
    *,
    level: str,
    form: str,
    cap: float,
    low: float,
    high: float,
) -> tuple[Tensor, Counted]:
    """The weights [T] of one level and form, and how many were changed, as (number, number of sampled tokens)."""
    if level == "token":
        log_w = log_weight
    else:
        total = sequence_sum if level == "sequence" else sequence_mean
        per_sequence = total(log_weight, known, need_borders(cu_seqlens))
        log_w = spread(per_sequence, need_borders(cu_seqlens), mask.numel()).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    w = zero_masked(log_w, mask).exp()
    count = mask.double().sum()
    over = mask & (w > (cap if form == "truncate" else high))
    under = mask & (w < low) if form == "mask" else torch.zeros_like(mask)
    changed = "truncated_tokens" if form == "truncate" else "masked_tokens"
    stats: Counted = {changed: ((over | under).double().sum(), count)}
    out = w.clamp(max=cap) if form == "truncate" else torch.where(over | under, torch.zeros_like(w), w)
    stats["rollout_weight"] = (zero_masked(out, mask).double().sum(), count)
    return out, stats


def normalized(weight: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """weight / its mean over the mask on all ranks; unchanged where that mean is 0."""
    totals = torch.stack([zero_masked(weight, mask).double().sum(), mask.double().sum()])
    totals = totals if reduce is None else reduce(totals)
    mean = totals[0] / totals[1].clamp(min=1)
    return torch.where(mask & (mean > 0), weight / mean.clamp(min=1e-300).to(weight.dtype), weight)


def need_borders(cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        raise ValueError("weights or rejections of sequences need cu_seqlens")
    return cu_seqlens


def check(
    *,
    cap: float,
    low: float,
    high: float,
    rejection: list[dict[str, Any]] | None,
    outlier_low: float | None,
    outlier_high: float | None,
    off_policy_delta: float | None,
    **_: object,
) -> str | None:
    if not cap > 0:
        return f"cap = {cap} must be positive"
    if not 0 <= low <= high:
        return f"low = {low} and high = {high} must be ratios, the lower one first"
    try:
        for spec in rejection or []:
            parse_rule(spec)
        if outlier_low is not None or outlier_high is not None:
            parse_rule({"statistic": "k1", "level": "seq_max", "lower": outlier_low, "upper": outlier_high})
    except ValueError as error:
        return str(error)
    return None


def more_needs(
    *,
    level: str,
    batch_normalize: bool,
    rejection: list[dict[str, Any]] | None,
    outlier_low: float | None,
    outlier_high: float | None,
    off_policy_delta: float | None,
    **_: object,
) -> tuple[str, ...]:
    """Whole sequences, the whole batch and rejections need the old log-probs before the update."""
    rejects = bool(rejection) or any(x is not None for x in (outlier_low, outlier_high, off_policy_delta))
    return ("old_log_prob",) if rejects or batch_normalize or level in ("sequence", "geometric") else ()


def geometric_bounds(lower: float, upper: float) -> list[dict[str, Any]]:
    return [{"statistic": "k1", "level": "seq_mean", "lower": lower, "upper": upper}]


PRESETS: dict[str, dict[str, Any]] = {
    "none": {"level": "none"},
    "token_truncate": {},
    "token_mask": {"form": "mask"},
    "icepop": {"form": "mask"},
    "sequence_truncate": {"level": "sequence"},
    "sequence_mask": {"level": "sequence", "form": "mask", "low": 0.0, "high": 2.0},
    "geometric_truncate": {"level": "geometric"},
    "geometric_mask": {"level": "geometric", "form": "mask", "low": 0.999, "high": 1.001},
    "reject_geometric": {"level": "none", "rejection": geometric_bounds(0.999, 1.001)},
    "reject_geometric_token_truncate": {"rejection": geometric_bounds(0.999, 1.001)},
    "reject_geometric_sequence_truncate": {"level": "sequence", "rejection": geometric_bounds(0.999, 1.001)},
    "reject_k3": {"level": "none", "rejection": [{"statistic": "k3", "level": "seq_mean", "upper": 0.01}]},
    "reject_k3_token_truncate": {"rejection": [{"statistic": "k3", "level": "seq_mean", "upper": 0.01}]},
    "reject_outliers_token_truncate": {"outlier_low": 1e-4},
    "off_policy_mask": {"level": "none", "off_policy_delta": 0.1},
}

for _name, _preset in PRESETS.items():
    add(
        make_entry(
            "correction",
            _name,
            rollout_correction,
            level="token" if _preset.get("level", "token") in ("token", "none") else "sequence",
            needs=("rollout_log_prob",) if _name != "none" else (),
            preset=_preset,
            check=check,
            more_needs=more_needs,
        )
    )
