"""The policy: log-probs of a batch, and its update.

One forward serves everything a token-level loss needs: the head makes its gradient in the forward, and the mismatch
against the engine's own log-probs is read off the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastrl.data.batch import RolloutBatch, cu_seqlens_of
from fastrl.data.packing import MicroBatch
from fastrl.dist.collectives import any_rank, world_size
from fastrl.kernels import LogProbs, linear_log_prob, linear_token_loss
from fastrl.models.forward import hidden_rows
from fastrl.models.head import head_of
from fastrl.trainer.losses import LossSettings, OptimizerBatch, token_terms
from fastrl.trainer.metrics import Metrics, policy_stat
from fastrl.trainer.optim import Optimizer, record_update
from fastrl.trainer.precision import autocast


class PolicyModel:
    """A causal language model seen as a map from micro-batches to log-probs (actor or reference)."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, dtype: torch.dtype) -> None:
        self.model, self.temperature, self.dtype = model, temperature, dtype

    def head_arguments(self) -> dict:
        """Keyword arguments of the head kernels, apart from hidden rows and labels."""
        head = head_of(self.model)
        return {
            "weight": head.weight,
            "bias": head.bias,
            "temperature": self.temperature,
            "logit_scale": head.logit_scale,
            "logit_softcap": head.logit_softcap,
        }

    @torch.no_grad()
    def log_prob(
        self,
        batch: RolloutBatch,
        micro_batches: Sequence[MicroBatch],
        *,
        want_entropy: bool = False,
        want_sum_sq: bool = False,
    ) -> dict[str, Tensor]:
        """Log-probs [T] of the sampled tokens (0 where no row asks for one), with entropy and sum_sq [T] if wanted."""
        size = batch.num_tokens
        out: dict[str, Tensor] = {}
        for micro in micro_batches:
            with autocast(self.dtype, batch.response_ids.device):
                hidden = hidden_rows(self.model, micro)
            rows = linear_log_prob(
                hidden, labels=micro.labels, want_entropy=want_entropy, want_sum_sq=want_sum_sq, **self.head_arguments()
            )
            for name, wanted in (("log_prob", True), ("entropy", want_entropy), ("sum_sq", want_sum_sq)):
                if wanted:
                    value = getattr(rows, name)
                    out.setdefault(name, value.new_zeros(size))[micro.token_index] = value
        if not out:
            out["log_prob"] = torch.zeros(size, device=batch.response_ids.device)
        return out


class Actor(PolicyModel):
    """The trained policy."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        settings: LossSettings,
        *,
        temperature: float,
        dtype: torch.dtype,
        gradient_in_forward: bool,
    ) -> None:
        super().__init__(model, temperature=temperature, dtype=dtype)
        self.optimizer, self.settings, self.gradient_in_forward = optimizer, settings, gradient_in_forward

    def update(
        self, members: OptimizerBatch, micro_batches: Sequence[MicroBatch], seen: Tensor, metrics: Metrics
    ) -> bool:
        """One optimizer update from the micro-batches of one optimizer batch; returns whether it was applied.

        `seen` [T] receives the log-probs of this forward. The gradient is the sum over micro-batches and ranks.
        """
        total = torch.zeros((), device=members.scale.device, dtype=members.scale.dtype)
        for micro in micro_batches:
            total += self.backward(members, micro, seen, metrics)
        finite = not any_rank(not bool(torch.isfinite(total)))
        lr = self.optimizer.lr
        norm, applied = self.optimizer.step(finite)
        metrics.add("policy/total_loss", total, 1 / world_size())
        record_update(metrics, "", self.optimizer, norm, lr, applied)
        return applied

    def backward(self, members: OptimizerBatch, micro: MicroBatch, seen: Tensor, metrics: Metrics) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the loss (0-d, detached)."""
        with autocast(self.dtype, micro.input_ids.device):
            hidden = hidden_rows(self.model, micro)
        path = self.loss_in_forward if self.gradient_in_forward else self.loss_recomputed
        loss, log_prob, entropy, stats = path(members, micro, hidden)
        loss.backward()
        seen[micro.token_index] = log_prob.to(seen.dtype)
        metrics.add_mean("policy/entropy", entropy)
        for name, value in stats.items():
            metrics.add_mean(STATS.get(name) or policy_stat(name), value)
            for extreme in EXTREMES.get(name, ()):
                getattr(metrics, f"add_{extreme[-3:]}")(extreme, value)
        metrics.add_sum("perf/unique_tokens", micro.num_rows)
        metrics.add_sum("perf/head_rows", micro.num_tokens)
        metrics.add_sum("perf/microbatches", 1)
        return loss.detach()

    def loss_in_forward(
        self, members: OptimizerBatch, micro: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Token-level losses: (loss, log_prob [N], entropy [N], stats), the head's gradient already made."""

        def token_loss(log_prob: Tensor, entropy: Tensor | None, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            return token_terms(self.settings, members, log_prob, entropy, micro.token_index[rows])

        loss, rows, stats = linear_token_loss(
            hidden, labels=micro.labels, token_loss_fn=token_loss, want_entropy=True, **self.head_arguments()
        )
        return loss, rows.log_prob, entropy_of(rows), stats

    def loss_recomputed(
        self, members: OptimizerBatch, micro: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Sequence-level losses: the head is run again in the backward, because ratios need whole sequences first."""
        rows = linear_log_prob(hidden, labels=micro.labels, want_entropy=True, **self.head_arguments())
        cu_seqlens = row_borders(members.batch, micro.token_index)
        loss, stats = token_terms(self.settings, members, rows.log_prob, rows.entropy, micro.token_index, cu_seqlens)
        return loss.sum(), rows.log_prob.detach(), entropy_of(rows).detach(), stats


def entropy_of(rows: LogProbs) -> Tensor:
    """The entropies [N] that were asked for."""
    assert rows.entropy is not None
    return rows.entropy


def row_borders(batch: RolloutBatch, token_index: Tensor) -> Tensor:
    """Borders [K+1] of the sequences among head rows that stand sequence after sequence."""
    owners = batch.sequence_index[token_index]
    return cu_seqlens_of(torch.unique_consecutive(owners, return_counts=True)[1])


STATS = {  # per-token statistics of losses -> metric names; others go by `policy_stat`
    "clip_high": "policy/clip_fraction/high",
    "clip_low": "policy/clip_fraction/low",
    "dual_clip": "policy/clip_fraction/dual",
    "ratio": "policy/ratio/mean",
    "k1": "kl/old_k1",
    "k3": "kl/old_k3",
    "kl": "kl/reference",
}
EXTREMES = {"ratio": ("policy/ratio/max", "policy/ratio/min"), "kl": ("kl/reference/max",)}
