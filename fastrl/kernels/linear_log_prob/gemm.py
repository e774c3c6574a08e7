"""The three matrix products of a language-model head, and the dtypes they run in."""

from __future__ import annotations

import torch


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of the products: hidden's own, or the autocast one inside an autocast region (never below float64)."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out [C, V] = hidden [C, H] weight [V, H]^T + bias [V]."""
    torch.mm(hidden, weight.t(), out=out)
    return out if bias is None else out.add_(bias)


def add_weight_gradient(total: torch.Tensor, d_logits: torch.Tensor, hidden: torch.Tensor, fresh: bool) -> None:
    """total [V, H] += d_logits [C, V]^T hidden [C, H]; `fresh`: total is uninitialised and is overwritten.

    A float32 total of products in a shorter dtype takes each chunk's product rounded once, and sums in float32.
    """
    if total.dtype == d_logits.dtype:
        if fresh:
            torch.mm(d_logits.t(), hidden, out=total)
        else:
            total.addmm_(d_logits.t(), hidden)
        return
    product = torch.mm(d_logits.t(), hidden)
    if fresh:
        total.copy_(product)
    else:
        total.add_(product)


def add_bias_gradient(total: torch.Tensor, d_logits: torch.Tensor) -> None:
    """total [V] += sum of d_logits [C, V] over rows, in total's dtype."""
    total.add_(d_logits.sum(0, dtype=total.dtype))
