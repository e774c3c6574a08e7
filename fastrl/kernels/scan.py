"""The masked reverse linear scan in plain torch: y_t = b_t + a_t y_{t+1} inside each sequence, by doubling.

log2(longest sequence) steps over the flat batch, no loop over tokens or sequences. a and b are composed as the affine
maps they are, so nothing is divided and long sequences cannot underflow into wrong values.
"""

from __future__ import annotations

import torch


def reverse_linear_scan(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """y_t = b_t + a_t y_{t+1}, y = 0 past the end of each sequence.

    Args:
        a: [T] float, coefficients.
        b: [T] float, terms.
        offsets: [S+1] int64, sequences of the flat batch.

    Returns:
        [T] float. A non-finite term reaches the earlier tokens of its own sequence only.
    """
    total = b.shape[0]
    lengths = offsets[1:] - offsets[:-1]
    longest = int(lengths.max()) if lengths.numel() else 0
    if total == 0 or longest <= 1:
        return b
    last = offsets[1:][lengths > 0] - 1
    a = a.index_fill(0, last, 0.0)
    step = 1
    while step < longest:
        head = a[:-step]
        # a zero coefficient cuts: 0 * inf of the next sequence must not get in
        carried = torch.where(head == 0, torch.zeros_like(head), head * b[step:])
        b = torch.cat([b[:-step] + carried, b[-step:]])
        a = torch.cat([head * a[step:], torch.zeros_like(a[-step:])])
        step *= 2
    return b


def next_trained(
    values: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor, segments: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """The value of the nearest trained token *after* t in its sequence; `after` [S] where there is none.

    Args:
        values: [T] float.
        mask: [T] bool, trained tokens.
        offsets: [S+1] int64.
        segments: [T] int64, sequence of each token.
        after: [S] float.

    Returns:
        [T] float.
    """
    total = values.shape[0]
    none = torch.full((1,), total, dtype=torch.int64, device=values.device)
    here = torch.where(mask, torch.arange(total, device=values.device), total)
    from_here = here.flip(0).cummin(0).values.flip(0)
    following = torch.cat([from_here[1:], none])
    inside = following < offsets[1:][segments]
    return torch.where(inside, values[following.clamp(max=total - 1)], after[segments])
