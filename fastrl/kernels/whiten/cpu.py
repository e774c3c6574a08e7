"""Masked whitening on a CPU, in blocks."""

from __future__ import annotations

import torch

from ..cpu_blocks import blocks, buffers, factor, flat_bytes, is_finite, times
from ..dispatch import accumulate_dtype
from .reference import whiten_reference


def whiten_cpu(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    """Same arguments and results as `whiten_reference`."""
    dtype, total = accumulate_dtype(x), x.numel()
    flat, marks = x.reshape(-1), flat_bytes(mask)
    out = flat.new_empty(total, dtype=dtype)
    first, second = buffers(2, total, dtype)
    summed = count = 0.0
    for part in blocks(total):
        inside = factor(marks, part, first)
        summed += float(times(flat[part], inside, out[part]).sum())
        count += part.stop - part.start if inside is None else float(inside.sum())
    given = mean is not None and var is not None
    centre = float(mean) if given and mean is not None else summed / max(count, 1)
    squares = 0.0
    for part in blocks(total):
        inside = factor(marks, part, first)
        deviation = out[part].sub_(centre)
        if inside is not None:
            deviation.mul_(inside)
        if not given:
            squares += float(torch.mul(deviation, deviation, out=second[: deviation.shape[0]]).sum())
    spread = float(var) if given and var is not None else squares / max(count - ddof, 1)
    if not is_finite(summed, centre, spread) or spread + eps == 0:  # 0 / 0 must stay inside the mask
        return whiten_reference(x, mask, mean, var, ddof, eps)
    if given or count >= 2:  # one value has no variance: it is centred, not scaled
        scale = (spread + eps) ** -0.5
        for part in blocks(total):
            out[part].mul_(scale)
    return out.view(x.shape)
