"""The policy: log-probs of a batch, and its update.

One forward serves everything a token-level loss needs: the head makes its gradient in the forward, and the mismatch
against the engine's own log-probs is read off the same pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastrl.data.batch import RolloutBatch, cu_seqlens_of
from fastrl.data.packing import MicroBatch
from fastrl.dist.collectives import any_rank, world_size
from fastrl.dist.fsdp import reshard
from fastrl.kernels import LogProbs, linear_log_prob, linear_token_loss
from fastrl.models.flops import ForwardFlops, forward_flops
from fastrl.models.forward import hidden_rows, inside, inside_head
from fastrl.models.head import HeadParameters
from fastrl.models.router import routed_rows
from fastrl.trainer.losses import LossSettings, OptimizerBatch, token_terms
from fastrl.trainer.metrics import Metrics, policy_stat
from fastrl.trainer.optim import Optimizer, record_update
from fastrl.trainer.precision import autocast
from fastrl.trainer.sequence import counts_loss, merge, own_rows, whole_rows

if TYPE_CHECKING:
    from fastrl.trainer.router_loss import RouterLoss

Result = TypeVar("Result")


class PolicyModel:
    """A causal language model seen as a map from micro-batches to log-probs (actor or reference)."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, dtype: torch.dtype) -> None:
        self.model, self.temperature, self.dtype = model, temperature, dtype

    @cached_property
    def flops(self) -> ForwardFlops:
        """Operations of a pass over a micro-batch."""
        return forward_flops(self.model)

    def head_arguments(self, head: HeadParameters) -> dict:
        """Keyword arguments of the head kernels, apart from hidden rows and labels."""
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
        metrics: Metrics | None = None,
    ) -> dict[str, Tensor]:
        """Log-probs [T] of the sampled tokens (0 where no row asks for one), with entropy and sum_sq [T] if wanted."""
        size = batch.num_tokens
        out: dict[str, Tensor] = {}
        for micro in micro_batches:
            if metrics is not None:
                metrics.add_sum("perf/model_flops", self.flops.forward(micro))
            own = own_rows(self.model, micro)

            def rows_of(hidden: Tensor, head: HeadParameters, labels: Tensor = own.labels) -> LogProbs:
                return linear_log_prob(
                    hidden,
                    labels=labels,
                    want_entropy=want_entropy,
                    want_sum_sq=want_sum_sq,
                    **self.head_arguments(head),
                )

            rows = self.with_head(own, rows_of)
            for name, wanted in (("log_prob", True), ("entropy", want_entropy), ("sum_sq", want_sum_sq)):
                if wanted:
                    value = getattr(rows, name)
                    out.setdefault(name, value.new_zeros(size))[own.token_index] = value
        reshard(self.model)
        if not out:
            out["log_prob"] = torch.zeros(size, device=batch.response_ids.device)
        return {name: merge(self.model, value) for name, value in out.items()}

    def with_head(self, micro: MicroBatch, function: Callable[[Tensor, HeadParameters], Result]) -> Result:
        """`function` of the rows [N, H] that predict the response tokens and of the head, in one forward pass."""

        def forward() -> Result:
            with autocast(self.dtype, micro.input_ids.device):
                hidden = hidden_rows(self.model, micro)
            return inside_head(self.model, function, hidden)

        return inside(self.model, forward)


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
        # KL [N] over the vocabulary of a micro-batch's rows, given its hidden rows; None without such a term
        self.full_kl: Callable[[MicroBatch, Tensor], Tensor] | None = None
        self.router: RouterLoss | None = None  # the load-balancing term of a mixture-of-experts model

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
        with metrics.counted():
            metrics.add("policy/total_loss", total, 1 / world_size())
            record_update(metrics, "", self.optimizer, norm, lr, applied)
        return applied

    def backward(self, members: OptimizerBatch, micro: MicroBatch, seen: Tensor, metrics: Metrics) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the loss (0-d, detached)."""
        own = own_rows(self.model, micro)
        path: Callable[..., tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]]
        counted: AbstractContextManager[None] = contextlib.nullcontext()
        if self.gradient_in_forward:
            rows_of, counted, path = own, metrics.counted(), partial(self.loss_in_forward, members, own)
        else:
            rows_of, path = micro, partial(self.loss_recomputed, members, micro, own)

        def forward() -> tuple[Tensor, Tensor | None, Tensor, Tensor, dict[str, Tensor]]:
            hidden, probabilities = self.hidden_and_router(own)
            found = inside_head(self.model, path, hidden)
            return found[0], self.row_terms(members, own, hidden, probabilities, metrics), *found[1:]

        loss, more, log_prob, entropy, stats = inside(self.model, forward)
        (loss if more is None else loss + more).backward()
        seen[rows_of.token_index] = log_prob.to(seen.dtype)
        with counted:
            metrics.add_mean("policy/entropy", entropy)
            for name, value in stats.items():
                metrics.add_mean(STATS.get(name) or policy_stat(name), value)
                if name == "clipped_weight":
                    metrics.add_sum("mismatch/clipped_tokens", value.sum())
                for extreme in EXTREMES.get(name, ()):
                    getattr(metrics, f"add_{extreme[-3:]}")(extreme, value)
        metrics.add_sum("perf/model_flops", self.flops.update(micro))
        metrics.add_sum("perf/unique_tokens", micro.num_rows)
        metrics.add_sum("perf/head_rows", micro.num_tokens)
        metrics.add_sum("perf/padding", micro.num_rows - sum(end - start for start, end, _ in micro.segments))
        metrics.add_sum("perf/microbatches" if micro.num_rows else "perf/empty_microbatches", 1)
        share = loss.detach() if rows_of is own or counts_loss(self.model) else torch.zeros_like(loss.detach())
        return share if more is None else share + more.detach()

    def hidden_and_router(self, own: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Hidden rows [N, H], and with a router in the loss its probabilities of them."""
        with autocast(self.dtype, own.input_ids.device):
            if self.router is None:
                return hidden_rows(self.model, own), None
            return routed_rows(self.model, own)

    def row_terms(
        self, members: OptimizerBatch, own: MicroBatch, hidden: Tensor, probabilities: Tensor | None, metrics: Metrics
    ) -> Tensor | None:
        """Terms of the loss that need more of a row than its log-prob: KL over the vocabulary, router balance."""
        terms = []
        with metrics.counted():
            if self.full_kl is not None:
                kl = self.full_kl(own, hidden)
                terms.append(self.settings.kl_coef * (kl * members.scale[own.token_index]).sum())
                metrics.add_mean("kl/reference", kl.detach())
                metrics.add_max("kl/reference/max", kl.detach())
            if self.router is not None and probabilities is not None:
                terms.append(self.router.term(probabilities))
                metrics.add_sum("policy/router_loss", terms[-1].detach() / self.router.coef)
        return sum(terms[1:], terms[0]) if terms else None

    def loss_in_forward(
        self, members: OptimizerBatch, micro: MicroBatch, hidden: Tensor, head: HeadParameters
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Token-level losses: (loss, log_prob [N], entropy [N], stats), the head's gradient already made."""

        def token_loss(log_prob: Tensor, entropy: Tensor | None, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            return token_terms(self.settings, members, log_prob, entropy, micro.token_index[rows])

        loss, rows, stats = linear_token_loss(
            hidden, labels=micro.labels, token_loss_fn=token_loss, want_entropy=True, **self.head_arguments(head)
        )
        return loss, rows.log_prob, entropy_of(rows), stats

    def loss_recomputed(
        self, members: OptimizerBatch, micro: MicroBatch, own: MicroBatch, hidden: Tensor, head: HeadParameters
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Sequence-level losses: the head is run again in the backward, because ratios need whole sequences first.

        Everything returned is of all head rows of `micro`, `own` being those whose hidden rows are here.
        """
        rows = linear_log_prob(hidden, labels=own.labels, want_entropy=True, **self.head_arguments(head))
        log_prob = whole_rows(self.model, micro, rows.log_prob)
        entropy = whole_rows(self.model, micro, entropy_of(rows))
        cu_seqlens = row_borders(members.batch, micro.token_index)
        loss, stats = token_terms(self.settings, members, log_prob, entropy, micro.token_index, cu_seqlens)
        return loss.sum(), log_prob.detach(), entropy.detach(), stats


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
    "applied_weight": "mismatch/applied_weight/mean",
    "clipped_weight": "mismatch/clipped_fraction",
}
EXTREMES = {"ratio": ("policy/ratio/max", "policy/ratio/min"), "kl": ("kl/reference/max",)}
