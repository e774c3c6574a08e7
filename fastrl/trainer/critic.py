"""The value model: values of a batch before its update, and its update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from fastrl.algorithms.value_loss import value_loss
from fastrl.data.batch import RolloutBatch
from fastrl.data.packing import MicroBatch
from fastrl.dist.collectives import any_rank, world_size
from fastrl.dist.fsdp import reshard
from fastrl.models.flops import ForwardFlops, forward_flops
from fastrl.models.forward import inside, trunk_rows
from fastrl.models.load import ValueModel
from fastrl.trainer.losses import OptimizerBatch
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.optim import Optimizer, record_update
from fastrl.trainer.precision import autocast
from fastrl.trainer.sequence import merge, own_rows


class Critic:
    """The policy's trunk class with a scalar head; V_t is read from the row that predicts token t."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: Optimizer,
        *,
        dtype: torch.dtype,
        value_clip: float | None = 0.5,
        huber_delta: float | None = None,
    ) -> None:
        self.model, self.optimizer, self.dtype = model, optimizer, dtype
        self.value_clip, self.huber_delta = value_clip, huber_delta

    @cached_property
    def flops(self) -> ForwardFlops:
        """Operations of a pass over a micro-batch."""
        return forward_flops(self.model)

    def rows(self, micro: MicroBatch, index: Tensor) -> Tensor:
        """Values of the trunk rows `index` [N], in the masters' type."""
        return value_rows(self.model, micro, index, self.dtype)

    @torch.no_grad()
    def values(
        self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch], metrics: Metrics | None = None
    ) -> dict[str, Tensor]:
        """Values [T], and bootstrap values [S] where the micro-batches carry rows for them (0 elsewhere)."""
        head = self.model.value_head.weight
        values = torch.zeros(batch.num_tokens, device=batch.response_ids.device, dtype=head.dtype)
        out = {"values": values}
        for micro in micro_batches:
            if metrics is not None:
                metrics.add_sum("perf/model_flops", self.flops.forward(micro))
            own = own_rows(self.model, micro)
            both = self.rows(own, torch.cat([own.head_index, own.bootstrap_index]))
            values[own.token_index] = both[: own.num_tokens]
            if micro.bootstrap_index.numel():
                bootstrap = out.setdefault("bootstrap_values", values.new_zeros(batch.num_sequences))
                bootstrap[own.bootstrap_sequence] = both[own.num_tokens :]
        reshard(self.model)
        return {name: merge(self.model, value) for name, value in out.items()}

    def update(self, members: OptimizerBatch, micro_batches: Sequence[MicroBatch], metrics: Metrics) -> bool:
        """One optimizer update; loss = 1/2 sum_t scale_t max((V - R)^2, (clip(V) - R)^2) over response tokens."""
        batch = members.batch
        total = torch.zeros((), device=members.scale.device, dtype=members.scale.dtype)
        for micro in micro_batches:
            own = own_rows(self.model, micro)
            index = own.token_index
            mask = members.scale[index] != 0
            old, returns = batch.need("values")[index], batch.need("returns")[index]
            values = self.rows(own, own.head_index)
            token_loss = value_loss(values, old, returns, value_clip=self.value_clip, huber_delta=self.huber_delta)
            loss = torch.where(mask, token_loss.loss * members.scale[index], torch.zeros_like(values)).sum()
            loss.backward()
            metrics.add_sum("perf/model_flops", self.flops.update(micro))
            total += loss.detach()
            with metrics.counted():
                metrics.add_mean("value/clip_fraction", token_loss.stats["clip"], mask)
        finite = not any_rank(not bool(torch.isfinite(total)))
        lr = self.optimizer.lr
        norm, applied = self.optimizer.step(finite)
        with metrics.counted():
            metrics.add("value/loss", total, 1 / world_size())
            record_update(metrics, "critic_", self.optimizer, norm, lr, applied)
        return applied


def value_rows(model: ValueModel, micro: MicroBatch, index: Tensor, dtype: torch.dtype) -> Tensor:
    """The value head of the trunk rows `index` [N] of a micro-batch, in the masters' type; `dtype` is computed in."""
    head = model.value_head

    def forward() -> Tensor:
        with autocast(dtype, micro.input_ids.device):
            hidden = trunk_rows(model, micro)[index]
        return head(hidden.to(head.weight.dtype)).squeeze(-1)

    return inside(model, forward)
