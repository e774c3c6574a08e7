"""The loss of the response tokens of one optimizer batch: policy term, KL, entropy, and the one division.

    loss = sum_t scale_t ( w_t policy_t + kl_coef kl_t - entropy_coef H_t ),   scale_t = 0 where loss_mask is False

`scale` comes from counts over the whole optimizer batch on all ranks, so no split into micro-batches can change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.algorithms.kl import unbiased_kl
from fastrl.algorithms.registry import Entry
from fastrl.data.batch import RolloutBatch
from fastrl.errors import ConfigError


@dataclass(frozen=True)
class LossSettings:
    """What the loss of a run is made of; `options` are the keyword arguments of the policy loss."""

    policy_loss: Entry
    options: dict[str, Any]
    kl: Entry | None = None  # estimator of the KL to the reference; None without such a term
    kl_coef: float = 0.0
    kl_unbiased: bool = False
    correction: Callable[..., Any] | None = (
        None  # token weights from (old, rollout log-probs), for runs without an old pass
    )


@dataclass(frozen=True)
class OptimizerBatch:
    """One optimizer batch: the rollout batch it points into and the per-token scale."""

    batch: RolloutBatch
    sequences: Tensor  # [K] int64, the members
    scale: Tensor  # [T] float, aggregation scale of the token's sequence, 0 where masked or not a member
    num_tokens: int = 1  # tokens in the loss, all ranks
    entropy_coef: float = 0.0
    num_updates_before: int = 0  # updates already made from this rollout batch
    version: int = 0  # weight updates that the engine has been given
    selection: Tensor | None = None  # [T] bool or float, made by a batch-level loss before its first forward


def token_terms(
    settings: LossSettings,
    members: OptimizerBatch,
    log_prob: Tensor,
    entropy: Tensor | None,
    index: Tensor,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scaled loss [N] of the tokens `index` [N] (positions in the batch's [T]) and their statistics.

    The sum over all tokens of all micro-batches and ranks is the loss of the optimizer batch.

    Args:
        log_prob: [N] float, current policy, with gradient.
        entropy: [N] float or None.
        index: [N] int64.
        cu_seqlens: [K+1] borders of the sequences among the N rows; sequence-level losses need it.
    """
    batch, scale = members.batch, members.scale[index]
    mask = scale != 0
    old = log_prob.detach() if batch.old_log_prob is None else batch.old_log_prob[index]
    rollout = None if batch.rollout_log_prob is None else batch.rollout_log_prob[index]
    data = {
        "log_prob": log_prob,
        "old_log_prob": old,
        "advantages": batch.need("advantages")[index],
        "entropy": entropy,
    }
    data |= {"rollout_log_prob": rollout, "loss_mask": mask, "cu_seqlens": cu_seqlens}
    stats: dict[str, Tensor] = {}
    weight = None if batch.rollout_weight is None else batch.rollout_weight[index]
    if settings.correction is not None and rollout is not None and batch.old_log_prob is None:
        weight = settings.correction(old, rollout, mask)
        stats |= {} if weight is None else applied(weight, old, rollout)
    data["rollout_weight"] = weight
    if members.selection is not None:
        data["selection"] = members.selection[index]
    if "staleness" in settings.policy_loss.data:
        data["staleness"] = staleness(members)[index]
    data["ref_log_prob"] = None if batch.ref_log_prob is None else batch.ref_log_prob[index]
    result = settings.policy_loss.call(data, settings.options)
    check_token_loss(settings.policy_loss.name, result, log_prob)
    loss = result.loss if weight is None or "rollout_weight" in settings.policy_loss.data else result.loss * weight
    stats |= result.stats | movement(log_prob.detach(), old)
    if settings.kl is not None and "logits" not in settings.kl.needs:  # `full` is added where the logits are
        kl = settings.kl.call({"log_prob": log_prob, "ref_log_prob": batch.need("ref_log_prob")[index]})
        kl = unbiased_kl(kl, log_prob, old) if settings.kl_unbiased else kl
        loss = loss + settings.kl_coef * kl
        stats["kl"] = kl.detach()
    if entropy is not None and members.entropy_coef:
        loss = loss - members.entropy_coef * entropy
    scaled = torch.where(mask, loss * scale, torch.zeros_like(loss))
    return scaled, {name: value.detach() for name, value in stats.items()}


def applied(weight: Tensor, old_log_prob: Tensor, rollout_log_prob: Tensor) -> dict[str, Tensor]:
    """The correction weight of each token and whether a bound changed it; all [T]."""
    w = (old_log_prob - rollout_log_prob).clamp(-20, 20).exp()
    changed = torch.isfinite(w) & ((weight - w).abs() > 1e-5 * w)
    return {"applied_weight": weight, "clipped_weight": changed.to(weight.dtype)}


def check_token_loss(name: str, result: Any, log_prob: Tensor) -> None:
    """Refuses what would be spread over the tokens by broadcasting, such as a mean: a loss has a value per token."""
    loss = getattr(result, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(f"algorithm.policy_loss = {name}: returned a {type(result).__name__} instead of a TokenLoss")
    for what, value in (("loss", loss), *((f"stats[{stat!r}]", value) for stat, value in result.stats.items())):
        if value.shape != log_prob.shape:
            raise ConfigError(
                f"algorithm.policy_loss = {name}: its {what} has shape {list(value.shape)} instead of "
                f"{list(log_prob.shape)}, one value per token: masks, means and sums are taken outside"
            )


def staleness(members: OptimizerBatch) -> Tensor:
    """Policy updates between the sampling of each token and now: [T] int64."""
    batch = members.batch
    behind = members.version - batch.policy_version + members.num_updates_before
    return behind[batch.sequence_index]


def movement(log_prob: Tensor, old_log_prob: Tensor) -> dict[str, Tensor]:
    """How far the policy moved, per token: k1 = -d and k3 = e^d - 1 - d with d = log_prob - old_log_prob."""
    d = (log_prob - old_log_prob).clamp(-20, 20)
    return {"k1": -d, "k3": torch.expm1(d) - d}
