"""What the Triton wrappers share: flat views, row arguments, partial buffers."""

from __future__ import annotations

import functools

import torch


def flat(x: torch.Tensor) -> torch.Tensor:
    """`x` as contiguous [numel]."""
    return x.reshape(-1).contiguous()


def flat_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as contiguous [numel] of a dtype that a kernel can load (bool as bytes)."""
    if mask is None:
        return None
    mask = flat(mask)
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def row_length(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """Tokens of a row of a padded [B, T]; 0 where offsets say it."""
    return 0 if cu_seqlens is not None else x.shape[1]


@functools.cache
def _arrivals(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def arrivals(device: torch.device) -> torch.Tensor:
    """The zeroed int32 counter of the current stream; the last program to count itself puts it back to 0."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _arrivals(device, stream)


def scale_arguments(
    x: torch.Tensor, scale: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None, int, int, int], int]:
    """((scale, offsets, row length, sequences, bisection steps), SCALE) for `token_sum.token_scale`."""
    if scale is None:
        return (None, None, 1, 1, 0), 0
    if scale.numel() == 1:
        return (scale, None, 1, 1, 0), 1
    scale = scale.contiguous()
    if cu_seqlens is None:
        return (scale, None, x.shape[1], x.shape[0], 0), 2
    sequences = scale.numel()
    return (scale, cu_seqlens.contiguous(), 1, sequences, sequences.bit_length()), 3
