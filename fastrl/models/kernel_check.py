"""A varlen kernel is used only after it has computed a small prefix tree right, values and gradients, on this device.

Versions of such kernels differ in where they align the causal mask when a segment has fewer queries than keys, and an
installation may lack the code for a card; both would otherwise be found out by a model that does not learn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.models.tiles import Segment, TilePlan, tiled_attention
from fastrl.models.varlen import VarlenFunction, VarlenPlan, varlen_attention

TOLERANCE = 3e-2  # relative, of bfloat16 against float32; a wrong mask is off by > 0.3
SEGMENTS: list[Segment] = [(0, 70, ()), (70, 75, ((0, 70),)), (75, 78, ((0, 70), (70, 72)))]


def what_is_wrong(function: VarlenFunction, device: torch.device, dtype: torch.dtype) -> str | None:
    """None when the kernel agrees with the tiles, else a few words."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for window in (None, 9):
            try:
                difference = _difference(function, device, dtype, window)
            except (RuntimeError, TypeError, ValueError) as error:
                return f"fails here ({next(iter(str(error).splitlines()), type(error).__name__)})"
            if not difference < TOLERANCE:
                return f"is off by {difference:.1e} on a shared prompt" + (" with a sliding window" if window else "")
    return None


def _difference(function: VarlenFunction, device: torch.device, dtype: torch.dtype, window: int | None) -> float:
    """Largest norm(difference) / norm of output and gradients."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 78, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2))
    weight = torch.randn(1, 78, 4, 64, generator=generator).to(device)

    def gradients(tensors: list[Tensor], out: Tensor) -> list[Tensor]:
        return [out.detach().float(), *torch.autograd.grad((out.float() * weight).sum(), tensors)]

    q, k, v = (t.clone().requires_grad_() for t in (query, key, value))
    out = varlen_attention(function, q, k, v, VarlenPlan(SEGMENTS, device), scaling=0.2, sliding_window=window)
    ours = gradients([q, k, v], out)
    q, k, v = (t.float().requires_grad_() for t in (query, key, value))
    out = tiled_attention(q, k, v, TilePlan(SEGMENTS, device), scaling=0.2, sliding_window=window)
    exact = gradients([q, k, v], out)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, exact))
