"""Liger's own functions that run without Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from bench.kernels.head_variants import SEQUENCES, Data, Step


def head(d: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The chunked GRPO loss; it takes [B, L] and one advantage per sequence."""
    shape = (SEQUENCES, -1)
    function = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")

    def loss(data: Data) -> torch.Tensor:
        mask = torch.ones(data.labels.shape).view(shape)
        result = function(
            data.hidden.view(*shape, data.hidden.shape[1]), data.weight, data.labels.view(shape), mask,
            data.advantages.view(shape)[:, 0], old_per_token_logps=data.old.view(shape),
        )  # fmt: skip
        return result[0] if isinstance(result, tuple) else result

    return Step(loss, d)
