"""Cast-and-copy of many tensors into one flat buffer, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def views_of(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> list[torch.Tensor]:
    """The places of the tensors in flat `out`, back to back, shaped like them."""
    views, at = [], 0
    for t in tensors:
        views.append(out[at : at + t.numel()].view(t.shape))
        at += t.numel()
    return views


def pack_weights_reference(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write each tensor, cast to out's dtype, behind the one before it."""
    if tensors:
        torch._foreach_copy_(views_of(tensors, out), list(tensors))
