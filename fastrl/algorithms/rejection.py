"""Rejection of tokens or sequences whose probability under the trainer and under the engine differ too much.

    log w = old_log_prob - rollout_log_prob, clamped to +-20;   k1 = log w,  k2 = (log w)^2 / 2,  k3 = w - 1 - log w

A rule takes one statistic at one level: each token's own, or the sum, the mean or the extreme over the sampled tokens
of a sequence. Bounds of k1 are ratios pi_train / pi_rollout (compared in log space), k2 and k3 have one upper bound.
https://fengyao.notion.site/off-policy-rl https://arxiv.org/abs/2512.02556
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.algorithms.options import nearest
from fastrl.algorithms.ragged import sequence_max, sequence_mean, sequence_sum, spread, zero_masked

STATISTICS = ("k1", "k2", "k3")
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")


@dataclass(frozen=True)
class Rule:
    """One rejection: keep where lower <= statistic <= upper. `seq_max` bounds the most extreme token on either side."""

    statistic: str
    level: str
    lower: float | None = None
    upper: float | None = None

    @property
    def name(self) -> str:
        return f"{self.level}_{self.statistic}"


def parse_rule(spec: Mapping[str, Any]) -> Rule:
    """A rule out of {statistic, level, lower, upper}.

    Raises:
        ValueError: an unknown word, a missing or impossible bound; the message says which.
    """
    known = ("statistic", "level", "lower", "upper")
    for key in spec:
        if key not in known:
            raise ValueError(f"rejection.{key}: unknown{nearest(key, known)} (a rule has {', '.join(known)})")
    for key, allowed in (("statistic", STATISTICS), ("level", LEVELS)):
        if spec.get(key) not in allowed:
            hint = nearest(str(spec.get(key)), allowed)
            raise ValueError(f"rejection.{key} = {spec.get(key)!r} is none of {', '.join(allowed)}{hint}")
    rule = Rule(spec["statistic"], spec["level"], spec.get("lower"), spec.get("upper"))
    if rule.statistic != "k1" and (rule.lower is not None or rule.upper is None):
        raise ValueError(f"rejection {rule.name}: {rule.statistic} takes one upper bound and no lower one")
    if rule.lower is None and rule.upper is None:
        raise ValueError(f"rejection {rule.name}: give lower, upper or both")
    bounds = [b for b in (rule.lower, rule.upper) if b is not None]
    if any(not b > 0 for b in bounds) or (len(bounds) == 2 and bounds[0] > bounds[1]):
        raise ValueError(f"rejection {rule.name}: bounds {bounds} must be positive, the lower one first")
    return rule


def statistic(log_weight: Tensor, kind: str) -> Tensor:
    """k1, k2 or k3 of each token: [T] -> [T]."""
    if kind == "k1":
        return log_weight
    return log_weight.square() / 2 if kind == "k2" else log_weight.exp() - 1 - log_weight


def kept(rule: Rule, log_weight: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Where the rule lets tokens pass: [T] bool (a sequence passes or fails as a whole unless level is token).

    Args:
        log_weight: [T] float, clamped log ratio of the old policy to the engine, 0 where unknown.
    """
    x = zero_masked(statistic(log_weight, rule.statistic), response_mask)
    ratio_bounds = rule.statistic == "k1"
    upper = math.inf if rule.upper is None else math.log(rule.upper) if ratio_bounds else rule.upper
    lower = -math.inf if rule.lower is None else math.log(rule.lower)
    if rule.level == "token":
        return (x <= upper) & (x >= lower)
    if rule.level == "seq_max":
        passed = (sequence_max(x, response_mask, cu_seqlens) <= upper) & (
            -sequence_max(-x, response_mask, cu_seqlens) >= lower
        )
    else:
        total = sequence_sum if rule.level == "seq_sum" else sequence_mean
        value = total(x, response_mask, cu_seqlens)
        passed = (value <= upper) & (value >= lower)
    return spread(passed, cu_seqlens, x.numel())


def off_policy_kept(
    log_weight: Tensor, advantages: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, delta: float
) -> Tensor:
    """Keep a sequence if its advantage is not negative or mean(rollout - current log-prob) <= delta: [T] bool.

    https://arxiv.org/abs/2512.02556
    """
    drift = sequence_mean(-log_weight, response_mask, cu_seqlens)
    advantage = sequence_mean(advantages, response_mask, cu_seqlens)
    return spread((advantage >= 0) | (drift <= delta), cu_seqlens, log_weight.numel())


def rejection_stats(
    keep: Tensor, response_mask: Tensor, cu_seqlens: Tensor, name: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Tokens and sequences that a rule rejects, each as (number, number there were)."""
    mask = response_mask.bool()
    lost = sequence_sum((mask & ~keep).double(), None, cu_seqlens)
    there = sequence_sum(mask.double(), None, cu_seqlens)
    gone = (there > 0) & (lost == there)
    return {
        f"rejected_tokens/{name}": (lost.sum(), there.sum()),
        f"rejected_sequences/{name}": (gone.double().sum(), (there > 0).double().sum()),
    }


def all_kept(*keeps: Tensor) -> Tensor:
    """Where every rule lets a token pass."""
    return torch.stack(keeps).all(0)
