"""The constant-decay reverse scan as a few small matrix products: the CPU path of gae and discounted_returns.

    y_t = d_t + g y_{t+1}

Inside a block of 64 tokens y is d times a triangular matrix of powers of g; what enters a block is the same recurrence
over the blocks' heads with decay g^64. No power is ever divided by, so nothing can underflow into a wrong value. Masked
tokens hand carries through unchanged, so leaving them out gives the same recurrence over the trained tokens alone.

One thread is several times faster this way than with `scan.reverse_linear_scan`, which stays the definition and takes
over where this does not apply: a decay per sequence, very uneven lengths, non-finite values.
"""

from __future__ import annotations

import torch

BLOCK = 64
# padding sequences to the longest may cost this many times the tokens
MAX_PADDING = 4.0


def constant_decay_scan(d: torch.Tensor, decay: float) -> torch.Tensor:
    """y [R, T] with y_t = d_t + decay y_{t+1} in each row of d [R, T]."""
    rows, length = d.shape
    blocks = -(-length // BLOCK)
    if blocks * BLOCK != length:
        d = torch.nn.functional.pad(d, (0, blocks * BLOCK - length))
    distance = torch.arange(BLOCK, device=d.device)[:, None] - torch.arange(BLOCK, device=d.device)
    powers = torch.where(distance >= 0, decay ** distance.clamp(min=0).to(d.dtype), 0.0)
    y = d.reshape(rows * blocks, BLOCK) @ powers
    if blocks > 1:
        y = y.view(rows, blocks, BLOCK)
        heads = constant_decay_scan(y[:, :, 0], decay**BLOCK)
        into = decay ** torch.arange(BLOCK, 0, -1, device=d.device, dtype=d.dtype)
        y[:, :-1].addcmul_(heads[:, 1:, None], into)
    return y.reshape(rows, blocks * BLOCK)[:, :length]


def _has_holes(mask: torch.Tensor) -> bool:
    """True when a row [R, T] has more than one run of trained tokens."""
    m = mask.view(torch.uint8)
    runs = (m[:, 1:] > m[:, :-1]).sum(1) + m[:, 0]
    return bool((runs > 1).any())


def _deltas(
    rewards: torch.Tensor, values: torch.Tensor | None, mask: torch.Tensor, after: torch.Tensor | None, gamma: float
) -> torch.Tensor:
    """r_t + gamma V' - V_t of rows without holes [R, T]; rewards and values are 0 outside the mask."""
    if values is None:
        return rewards
    d = rewards - values
    d[:, :-1].add_(values[:, 1:], alpha=gamma)
    if after is not None:
        last = mask.clone()
        last[:, :-1] &= ~mask[:, 1:]
        d += (gamma * after)[:, None] * last
    return d * mask  # a token before the first trained one has seen its value


def _scan_rows(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor,
    after: torch.Tensor | None,
    gamma: float,
    decay: float,
) -> torch.Tensor:
    return constant_decay_scan(_deltas(rewards, values, mask, after, gamma), decay).mul_(mask)


def fast_scan(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor | None,
    after: torch.Tensor | None,
    offsets: torch.Tensor | None,
    gamma: float,
    decay: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(carries, values, both 0 where masked) shaped like rewards, or None where the plain scan has to do it.

    Args:
        rewards: [T] with offsets [S+1], or [B, T] without.
        values: like rewards, or None for discounted returns.
        mask: like rewards, or None.
        after: [S] value behind the last trained token, or None for 0.
        offsets: of the ragged layout.
        gamma: discount of the next value.
        decay: gamma times lambda.
        dtype: of the result.
    """
    trained = torch.ones_like(rewards, dtype=torch.bool) if mask is None else (mask != 0)
    zero = torch.zeros((), dtype=dtype)
    v = zero if values is None else torch.where(trained, values.to(dtype), zero)
    if offsets is None and not _has_holes(trained):
        r = torch.where(trained, rewards.to(dtype), zero)
        y = _scan_rows(r, None if values is None else v, trained, after, gamma, decay)
    else:
        found = _compacted(rewards, values, trained, after, offsets, gamma, decay, dtype)
        if found is None:
            return None
        y = found
    # a triangular product multiplies non-finite values by 0: they would reach tokens behind them
    return (y, v) if bool(torch.isfinite(y.sum())) else None


def _compacted(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    trained: torch.Tensor,
    after: torch.Tensor | None,
    offsets: torch.Tensor | None,
    gamma: float,
    decay: float,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Trained tokens only, in rows padded to the longest; scanned; put back."""
    if offsets is None:
        counts = trained.sum(1)
    else:
        running = torch.nn.functional.pad(trained.cumsum(0), (1, 0))[offsets]
        counts = running[1:] - running[:-1]
    total, sequences = int(counts.sum()), counts.shape[0]
    if total == 0:
        return torch.zeros(rewards.shape, dtype=dtype)
    longest = int(counts.max())
    if sequences * longest > MAX_PADDING * total + 4096:
        return None
    place = torch.arange(longest) < counts[:, None]

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(place.shape, dtype=dtype).masked_scatter_(place, x[trained].to(dtype))

    y = _scan_rows(rows(rewards), None if values is None else rows(values), place, after, gamma, decay)
    return torch.zeros(rewards.shape, dtype=dtype).masked_scatter_(trained, y[place])
