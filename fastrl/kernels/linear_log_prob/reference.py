"""The ops behind `fastrl.kernels.linear_log_prob` with torch row passes; kernel.py has them with Triton ones."""

from __future__ import annotations

import torch

from ..checks import check_label_values
from ..log_prob.reference import RowOptions, RowStatistics
from .chunks import REFERENCE, RowKernels, backward_in_chunks, forward_in_chunks, make_head


def linear_log_prob_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    logit_scale: float,
    logit_softcap: float,
    ignore_index: int,
    want_entropy: bool,
    want_sum_sq: bool,
    chunk_size: int,
    dtype: torch.dtype,
    kernels: RowKernels = REFERENCE,
) -> RowStatistics:
    """Statistics [N] of the rows of hidden [N, H]; products in `dtype`, chunk_size 0: chosen for the device."""
    check_label_values("linear_log_prob", labels, weight.shape[0], ignore_index)
    options = RowOptions(temperature, temperature_value, logit_scale, logit_softcap, ignore_index)
    with torch.autocast(hidden.device.type, enabled=False):
        head = make_head(hidden, weight, bias, labels, options, dtype)
        return forward_in_chunks(head, kernels, want_entropy, want_sum_sq, chunk_size)


def linear_log_prob_backward_reference(
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    logit_scale: float,
    logit_softcap: float,
    ignore_index: int,
    entropy: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_size: int,
    dtype: torch.dtype,
    kernels: RowKernels = REFERENCE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients to hidden, weight and bias in their dtypes; empty where not needed."""
    options = RowOptions(temperature, temperature_value, logit_scale, logit_softcap, ignore_index)
    statistics = RowStatistics(row_max, entropy, row_max, row_max, log_sum)
    needs = (need_hidden, need_weight, need_bias and bias is not None)
    with torch.autocast(hidden.device.type, enabled=False):
        head = make_head(hidden, weight, bias, labels, options, dtype)
        total = backward_in_chunks(
            head, kernels, statistics, grad_log_prob, grad_entropy, needs, weight.dtype, chunk_size
        )
    return (
        _given(total.hidden, hidden),
        _given(total.weight, weight),
        _given(total.bias, hidden if bias is None else bias),
    )


def _given(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if gradient is None else gradient.to(like.dtype)
