"""The load-balancing loss of mixture-of-experts models, exact over an optimizer batch.  https://arxiv.org/abs/2101.03961

    coef E sum_e f_e P_e,   f_e = rows that expert e got / rows,   P_e = mean router probability, over layers and rows

Rows are those that predict a token of the loss. f is counted over the whole optimizer batch, all ranks, in a pass
before its forward, so that the sum over micro-batches is the loss of the batch however it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fastrl.data.packing import MicroBatch
from fastrl.dist.fsdp import reshard
from fastrl.models.forward import inside
from fastrl.models.router import assignments, experts_of, routed_rows
from fastrl.trainer.actor import PolicyModel
from fastrl.trainer.normalizers import reduce_one
from fastrl.trainer.precision import autocast
from fastrl.trainer.sequence import merge, own_rows


@dataclass
class RouterLoss:
    """The term of one policy. `fraction` [E] and `rows` (layers x rows, all ranks) belong to the optimizer batch."""

    policy: PolicyModel
    coef: float
    fraction: Tensor | None = None
    rows: float = 0.0

    def __post_init__(self) -> None:
        self.experts = experts_of(self.policy.model.config)

    @torch.no_grad()
    def count(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Count where the rows of an optimizer batch go, over all ranks, before its update."""
        device = micro_batches[0].input_ids.device if micro_batches else self.policy.model.device
        total = torch.zeros(self.experts.number, dtype=torch.float64, device=device)
        for micro in micro_batches:
            own = own_rows(self.policy.model, micro)
            with autocast(self.policy.dtype, device):
                _, probabilities = inside(self.policy.model, partial(routed_rows, self.policy.model, own))
            total += assignments(probabilities, self.experts)
        reshard(self.policy.model)
        total = reduce_one(merge(self.policy.model, total))  # a sequence group counts its rows together
        self.rows = float(total.sum()) / self.experts.per_row
        self.fraction = total / max(self.rows, 1.0)

    def term(self, probabilities: Tensor) -> Tensor:
        """A micro-batch's share of the loss: probabilities [layers, N, E] with gradient -> 0-d."""
        assert self.fraction is not None
        share = probabilities.double().sum((0, 1)) / max(self.rows, 1.0)
        return self.coef * self.experts.number * (self.fraction * share).sum()
