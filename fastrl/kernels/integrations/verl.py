"""verl's advantage, loss, KL and log-prob functions (0.9; padded layout) on `fastrl.kernels`.

Numbers are verl's own inside the mask. Outside it, advantages and returns are 0 (verl leaves arithmetic on padding
there).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .. import aggregate, clipped_policy_loss, clipped_value_loss, gae, group_normalize, kl_divergence, log_prob, whiten
from . import replace_everywhere


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the mask; 0 outside."""
    if not shift_mean:
        raise ValueError("masked_whiten: shift_mean = False: only True is supported")
    if mask.sum() < 2:
        raise ValueError("masked_whiten: fewer than 2 values inside the mask have no variance")
    return whiten(values, mask)


def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float | torch.Tensor,
    lam: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whitened advantages and returns, all [bs, response_length]."""
    advantages, returns = gae(token_level_rewards, values, response_mask, gamma=float(gamma), gae_lambda=float(lam))
    return whiten(advantages, response_mask), returns


def _group_ids(index: Any, device: torch.device) -> torch.Tensor:
    """Integers for the group names (strings, in verl) of an array."""
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in index.tolist()], device=device)


def _grouped(
    rewards: torch.Tensor, mask: torch.Tensor, index: Any, alone: float, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative scores spread over the mask; alone in its group, a sample keeps score x alone, as in verl."""
    with torch.no_grad():
        scores = rewards.sum(dim=-1)
        ids = _group_ids(index, rewards.device)
        sizes = torch.bincount(ids, minlength=1)[ids]
        advantages = torch.where(sizes == 1, scores * alone, group_normalize(scores, ids, **options))
        spread = advantages.unsqueeze(-1) * mask
    return spread, spread


def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score - mean) / (std + epsilon) of its group, spread over the mask, [bs, response_length] twice."""
    scale = "std" if norm_adv_by_std_in_grpo else "none"
    alone = 1 / (1 + epsilon) if norm_adv_by_std_in_grpo else 1.0
    return _grouped(token_level_rewards, response_mask, index, alone, scale=scale, eps=epsilon)


def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """score - mean of the group's other scores, spread over the mask, [bs, response_length] twice."""
    return _grouped(token_level_rewards, response_mask, index, 1.0, scale="none", baseline="leave_one_out")


def _aggregation(
    like: torch.Tensor,
    mode: str,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
    **_: Any,
) -> dict[str, Any]:
    """verl's counts as arguments of `aggregate`."""
    if mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
        loss_scale_factor = like.shape[-1]
    return {
        "loss_agg_mode": mode,
        "num_tokens": batch_num_tokens,
        "num_sequences": global_batch_size,
        "loss_scale_factor": loss_scale_factor,
    }


def _needs_counts(mode: str, dp_size: int, batch_num_tokens: Any, global_batch_size: Any) -> None:
    if dp_size > 1 and mode != "token-sum":
        name, value = ("batch_num_tokens", batch_num_tokens)
        if mode != "token-mean":
            name, value = ("global_batch_size", global_batch_size)
        if value is None:
            raise ValueError(f"agg_loss: {name} = None: the global count is needed when dp_size = {dp_size}")


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> torch.Tensor:
    """The aggregated loss times dp_size, a scalar."""
    _needs_counts(loss_agg_mode, dp_size, batch_num_tokens, global_batch_size)
    options = _aggregation(loss_mat, loss_agg_mode, batch_num_tokens, global_batch_size, loss_scale_factor)
    return aggregate(loss_mat, loss_mask, **options) * dp_size


def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The dual-clipped loss and its metrics; config is verl's ActorConfig."""
    if config is None:
        raise ValueError("compute_policy_loss_vanilla: config = None: verl's ActorConfig is needed")
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    counts = dict(config.global_batch_info)
    dp_size = counts.pop("dp_size", 1)
    _needs_counts(loss_agg_mode, dp_size, counts.get("batch_num_tokens"), counts.get("global_batch_size"))
    result = clipped_policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask,
        clip_low=low,
        clip_high=high,
        dual_clip=config.get("clip_ratio_c", 3.0),
        weights=rollout_is_weights,
        **_aggregation(log_prob, loss_agg_mode, **counts),
    )
    stats = result.stats
    metrics = {
        "actor/pg_clipfrac": (stats["clip_high"] + stats["clip_low"]).item(),
        "actor/ppo_kl": stats["k1"].item(),
        "actor/pg_clipfrac_lower": stats["clip_dual"].item(),
    }
    return result.loss * dp_size, metrics


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(clipped value loss, fraction of tokens where the clipped square was larger)."""
    _needs_counts(loss_agg_mode, dp_size, batch_num_tokens, global_batch_size)
    result = clipped_value_loss(
        vpreds,
        values,
        returns,
        response_mask,
        value_clip=cliprange_value,
        **_aggregation(vpreds, loss_agg_mode, batch_num_tokens, global_batch_size, loss_scale_factor),
    )
    return result.loss * dp_size, result.stats["clip"]


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Per-token KL estimate of the kind named."""
    return kl_divergence(logprob, ref_logprob, kind=kl_penalty)


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """Log-probs of the labels, shaped like them."""
    return log_prob(logits, labels).log_prob


_CORE = (
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "agg_loss",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "kl_penalty",
)


def install() -> Callable[[], None]:
    """Replace verl's functions in every loaded verl module and its registries; returns the function that undoes it."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    helpers = importlib.import_module("verl.utils.torch_functional")
    mine = globals()
    pairs = [(getattr(core, name), mine[name]) for name in _CORE]
    pairs.append((helpers.logprobs_from_logits, logprobs_from_logits))
    by_id = {id(original): new for original, new in pairs}
    undo: list[Callable[[], None]] = [replace_everywhere("verl", pairs)]
    for registry in (core.ADV_ESTIMATOR_REGISTRY, core.POLICY_LOSS_REGISTRY):
        before = dict(registry)
        registry.update({key: by_id[id(value)] for key, value in before.items() if id(value) in by_id})
        undo.append(functools.partial(registry.update, before))

    def restore() -> None:
        for step in undo:
            step()

    return restore
