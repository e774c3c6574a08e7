"""From the cases' padded, JSON-shaped inputs to the package's ragged batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastrl.algorithms.entry import make_entry
from fastrl.algorithms.losses.base import TokenLoss
from fastrl.data.batch import RolloutBatch, cu_seqlens_of
from fastrl.trainer.losses import LossSettings, OptimizerBatch, token_terms
from fastrl.trainer.normalizers import optimizer_batch

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def numbers(value: Any) -> Any:
    """JSON values with the words for non-finite numbers, and null as NaN, replaced."""
    if isinstance(value, list):
        return [numbers(v) for v in value]
    if value is None:
        return math.nan
    return WORDS.get(value, value) if isinstance(value, str) else value


def tensor(value: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers(value), dtype=dtype)


def flags(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.bool)


def plain(value: Any) -> Any:
    """Tensors as lists of Python numbers."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist() if value.is_floating_point() else value.tolist()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value


def make_batch(
    lengths: list[int], *, mask: Tensor | None = None, group: list[int] | None = None, **more: Any
) -> RolloutBatch:
    """A batch of responses of the given lengths, one prompt token each, ids 0, and any further fields."""
    count, total = len(lengths), sum(lengths)
    ids = list(range(count)) if group is None else group
    distinct = sorted(set(ids))
    fields: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(distinct), dtype=torch.int64),
        "prompt_cu_seqlens": torch.arange(len(distinct) + 1),
        "response_ids": torch.zeros(total, dtype=torch.int64),
        "cu_seqlens": cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64)),
        "group_index": torch.tensor([distinct.index(g) for g in ids], dtype=torch.int64),
        "group_id": torch.tensor(ids, dtype=torch.int64),
        "sample_id": torch.arange(count),
        "finish_reason": torch.zeros(count, dtype=torch.int8),
        "policy_version": torch.zeros(count, dtype=torch.int64),
        "response_mask": torch.ones(total, dtype=torch.bool) if mask is None else mask,
        "valid": torch.ones(count, dtype=torch.bool),
        "advantages": torch.zeros(total),
    }
    return RolloutBatch(**(fields | more))


def given(log_prob: Tensor) -> TokenLoss:
    """A policy loss whose token losses are handed in instead of computed."""
    return TokenLoss(log_prob)


GIVEN = LossSettings(make_entry("policy_loss", "given", given, level="token"), {})


def optimizer_members(mask: Tensor, lengths: list[int], mode: str, factor: float | None, **more: Any) -> OptimizerBatch:
    """The optimizer batch of all sequences, with the scale of the training step."""
    batch = make_batch(lengths, mask=mask, **more)
    name = mode.replace("_", "-")
    return optimizer_batch(batch, torch.arange(len(lengths)), mask, loss_agg_mode=name, loss_scale_factor=factor)


def token_sum(
    settings: LossSettings, log_prob: Tensor, mask: Tensor, **fields: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The token losses of one sequence under the training step's own loss, unscaled."""
    members = optimizer_members(mask, [log_prob.numel()], "token-sum", None, **fields)
    index = torch.arange(log_prob.numel())
    return token_terms(settings, members, log_prob, None, index, members.batch.cu_seqlens)
