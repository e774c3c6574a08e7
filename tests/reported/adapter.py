"""`run_case(op, inputs)`: the computation that a reported case names, done by the package's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import reported_logits
import reported_loop
import reported_losses
import reported_returns
from reported_data import plain

OPS = (
    "aggregate_loss", "aggregate_loss_invariance", "aggregate_loss_all_modes", "aggregate_loss_packed", "loss_windows",
    "reduce_metric", "group_advantage", "group_advantage_table", "broadcast_advantage", "whiten", "whiten_sharded",
    "row_normalize", "discounted_return", "kl_shaped_return", "informative_groups", "filter_groups", "gae",
    "gae_outcome", "gae_batch", "gae_formula", "gae_formula_lengths", "gae_identities", "place_score",
    "clipped_policy_loss", "gspo_loss", "cispo_loss", "corrected_policy_loss", "seq_mask_tis_weights", "tis_weights",
    "masked_entropy_proxy", "value_loss", "total_loss", "kl_estimate", "kl_estimate_clipped", "kl_masked_mean",
    "kl_expectation", "kl_importance_corrected", "kl_shaped_rewards", "kl_descent", "adaptive_kl", "logprob_entropy",
    "logprob_entropy_view", "logprob_entropy_formula", "logprob_entropy_formula2", "logprob_entropy_rows",
    "engine_logprob_consistency", "packed_next_token", "position_ids", "vocab_guard", "completion_mask",
    "overlong_filter", "overlong_penalty", "overlong_penalty_from_mask", "scored_tokens", "token_in_token_out",
    "prompt_filter", "combine_rewards", "reward_contract", "generate_pairs", "pass_at_k", "eval_accuracy",
    "lr_schedule", "nan_grad_step", "grad_clip", "grad_clip_accumulated", "bf16_update", "micro_batch_count",
    "resume_steps", "resume_lr", "unpermute", "config_check",
)  # fmt: skip
ROOMS = (reported_losses, reported_returns, reported_logits, reported_loop)


def operation(op: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function of this folder that maps an op to the package."""
    if op not in OPS:
        raise KeyError(f"unknown op {op!r}")
    return next(getattr(room, op) for room in ROOMS if hasattr(room, op))


def run_case(op: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the package computes for the inputs of a case, as plain Python numbers and lists."""
    return plain(operation(op)(inputs))
