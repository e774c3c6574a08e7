"""Masked whitening in plain torch."""

from __future__ import annotations

import torch

from ..dispatch import accumulate_dtype
from ..ragged import bool_mask


def whiten_reference(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    """The equation of `fastrl.kernels.whiten`; differentiable in x."""
    dtype = accumulate_dtype(x)
    zero = torch.zeros((), dtype=dtype, device=x.device)
    inside = bool_mask(mask, x)
    flat = torch.where(inside, x.reshape(-1).to(dtype), zero)
    if mean is None or var is None:
        count = inside.sum()
        mean = flat.sum() / count.clamp(min=1)
        deviation = torch.where(inside, flat - mean, zero)
        var = (deviation * deviation).sum() / (count - ddof).clamp(min=1)
        # one value has no variance: it is centred, not scaled
        scale = torch.where(count < 2, torch.ones_like(zero), torch.rsqrt(var + eps))
    else:
        mean, var = mean.to(dtype), var.to(dtype)
        deviation = flat - mean
        scale = torch.rsqrt(var + eps)
    return torch.where(inside, deviation * scale, zero).reshape(x.shape)
