"""What a step's metrics say about its batch: rewards, groups, lengths, values, mismatch, memory, data position."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastrl.algorithms.groups import group_counts
from fastrl.data.batch import FinishReason, RolloutBatch
from fastrl.dist.collectives import rank
from fastrl.trainer.metrics import Metrics

if TYPE_CHECKING:
    from fastrl.trainer.loop import Parts


def rollout_metrics(batch: RolloutBatch, metrics: Metrics) -> None:
    """What was generated and how it scored."""
    lengths, valid, scores = batch.lengths, batch.need("valid"), batch.need("scores")
    metrics.add_moments("reward", scores, valid)
    metrics.add_sum("reward/unscorable", (~valid).sum())
    for name, column in (batch.components or {}).items():
        metrics.add_mean(f"reward/component/{name}/mean", column, ~column.isnan())
    counts = group_counts(scores, batch.group_id, valid)
    equal, groups = counts["groups_without_spread"]
    metrics.add("reward/zero_variance_fraction", equal, groups - counts["groups_of_one"][0])
    metrics.add_sum("reward/group_of_one", counts["groups_of_one"][0])
    metrics.add_moments("rollout/length", lengths)
    metrics.add_mean("rollout/truncated_fraction", (batch.finish_reason == int(FinishReason.length)).double())
    metrics.add_sum("rollout/aborted", (batch.finish_reason == int(FinishReason.abort)).sum())
    metrics.add_sum("rollout/empty_responses", (lengths == 0).sum())
    totals: dict[str, Any] = {"tokens": batch.num_tokens, "samples": batch.num_sequences, "groups": batch.num_groups}
    for name, value in totals.items():
        metrics.add_sum(f"rollout/{name}", value)
    metrics.add_sum("rollout/prompt_tokens", batch.prompt_ids.numel())
    metrics.add_mean("rollout/policy_version", batch.policy_version.double())
    if batch.num_sequences:
        metrics.add_min("rollout/policy_version/min", batch.policy_version.double())
    if batch.rollout_log_prob is not None:
        metrics.add_mean("rollout/log_prob/mean", batch.rollout_log_prob, batch.response_mask)


def value_metrics(batch: RolloutBatch, metrics: Metrics) -> None:
    """The critic's estimates against the returns they are trained on."""
    values, returns = batch.need("values"), batch.need("returns")
    mask = batch.response_mask & batch.need("valid")[batch.sequence_index]
    metrics.add_moments("value", values, mask)
    metrics.add_moments("value/return", returns, mask)
    metrics.add_explained_variance("value/explained_variance", returns, values, mask)


def mismatch_metrics(batch: RolloutBatch, log_prob: Tensor, metrics: Metrics) -> None:
    """Trainer against engine, log w = log_prob - rollout_log_prob; log_prob [T], NaN where it was not computed."""
    if batch.rollout_log_prob is None:
        return
    rollout = batch.rollout_log_prob.to(log_prob.dtype)
    mask = batch.response_mask & ~log_prob.isnan() & ~rollout.isnan()
    zero = torch.zeros_like(log_prob)
    log_w = torch.where(mask, log_prob - rollout, zero).clamp(-20, 20)
    weight = log_w.exp()
    probability, sampled = torch.where(mask, log_prob, zero).exp(), torch.where(mask, rollout, zero).exp()
    metrics.add_mean("mismatch/k1/mean", log_w, mask)
    metrics.add_mean("mismatch/k3/mean", torch.expm1(log_w) - log_w, mask)
    metrics.add_max("mismatch/k3/max", torch.expm1(log_w) - log_w, mask)
    metrics.add_mean("mismatch/abs/mean", log_w.abs(), mask)
    metrics.add_max("mismatch/max", log_w.abs(), mask)
    metrics.add_mean("mismatch/chi2", weight * weight - 1, mask)
    metrics.add_ess("mismatch/ess", weight, mask)
    metrics.add_moments("mismatch/weight", weight, mask)
    metrics.add_pearson("mismatch/pearson", probability, sampled, mask)
    metrics.add_mean("mismatch/prob_diff/mean", (probability - sampled).abs(), mask)
    metrics.add_max("mismatch/prob_diff/max", (probability - sampled).abs(), mask)
    per_sequence = log_w.new_zeros(batch.num_sequences).index_add_(0, batch.sequence_index, log_w)
    lengths = torch.bincount(batch.sequence_index[mask], minlength=batch.num_sequences)
    metrics.add_mean("mismatch/ppl_ratio", (-per_sequence / lengths.clamp(min=1)).exp(), lengths > 0)
    metrics.add_mean("mismatch/chi2/sequence", (2 * per_sequence).clamp(max=40).exp() - 1, lengths > 0)
    metrics.add_sum("mismatch/missing_log_probs", (batch.response_mask & rollout.isnan()).sum())


def batch_metrics(batch: RolloutBatch, parts: Parts, metrics: Metrics) -> None:
    """Everything about the finished step that no stage has recorded itself."""
    if parts.critic is not None:
        value_metrics(batch, metrics)
    cursor = parts.cursor
    metrics.set("data/epoch", float(cursor.epoch))
    metrics.set("data/position", cursor.position)
    metrics.add_sum("rollout/engine_restarts", parts.memory.new_restarts())
    metrics.set("data/overlong_prompts", parts.num_overlong_prompts)
    metrics.set("optim/total_updates", parts.actor.optimizer.updates)
    if parts.entropy.active:
        metrics.set("policy/entropy_coef", parts.entropy.value)
    if parts.plan.reference and parts.config.algorithm.kl_loss_coef:
        metrics.set("kl/loss_coef", parts.config.algorithm.kl_loss_coef)
    metrics.add_memory(parts.device)


def finite(values: dict[str, float]) -> dict[str, float]:
    """The values that are numbers, for comparisons."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def is_main() -> bool:
    """True on the rank that writes files and the terminal."""
    return rank() == 0
