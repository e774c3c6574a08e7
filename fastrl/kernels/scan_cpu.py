"""The constant-decay reverse scan on a CPU: what `gae` and `discounted_returns` run there.

    y_t = d_t + g y_{t+1}

Inside a block of 16 tokens y is d times a triangular matrix of powers of g; what enters a block is the same recurrence
over the blocks' heads with decay g^16. No power is ever divided by, so nothing can underflow into a wrong value. Masked
tokens hand carries through unchanged, so leaving them out gives the same recurrence over the trained tokens alone.

A sequence gets the same bits in either layout and whatever else is in the batch: blocks begin where sequences begin,
and products have a multiple of 4 rows. `scan.reverse_linear_scan` stays the definition and takes over for a decay per
sequence and where a value is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .cpu_blocks import as_bytes, times
from .scan_blocks import BLOCK, ROW_MULTIPLE, Blocks, constants, in_windows, into_blocks, out_of_blocks, with_room

# Tokens of a group of rows or sequences, for each thread: its buffers stay near the cache, fixed costs do not weigh
GROUP = 1 << 18
# Heads of ragged blocks are scanned in rows where these hold at most so many times the heads (and a few), else as
# ragged blocks again: the same sums, and less fixed cost
MAX_PADDING, FEW = 4, 1 << 12
WIDTH = BLOCK * ROW_MULTIPLE


class Scan(NamedTuple):
    """What is scanned: the constants, and the dtype of the result."""

    gamma: float  # discount of the next value
    decay: float  # gamma times lambda
    dtype: torch.dtype


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def scan_rows(d: torch.Tensor, decay: float, out: torch.Tensor) -> torch.Tensor:
    """y of each row of d [R, W] in `out`; both contiguous, W a multiple of 64."""
    rows, width = d.shape
    blocks = width // BLOCK
    powers, into = constants(decay, d.dtype)
    torch.mm(d.view(-1, BLOCK), powers, out=out.view(-1, BLOCK))
    y = out.view(rows, blocks, BLOCK)
    heads = d.new_zeros((rows, _round_up(blocks, WIDTH)))
    heads[:, :blocks] = y[:, :, 0]
    if blocks > BLOCK:
        carries = scan_rows(heads, decay**BLOCK, torch.empty_like(heads))
    else:
        carries = torch.empty_like(heads)  # into given memory: a product that makes its own has autocast's type
        torch.mm(heads.view(-1, BLOCK), constants(decay**BLOCK, d.dtype)[0], out=carries.view(-1, BLOCK))
    y[:, :-1].addcmul_(carries[:, 1:blocks, None], into)
    return out


def scan_ragged(d: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, decay: float) -> torch.Tensor:
    """y [T] of sequences back to back, none empty, in d [T + 16] (zeros behind); starts and lengths [S] int64."""
    blocks = Blocks.of(starts, lengths, d.shape[0] - BLOCK)
    count = blocks.blocks
    x = into_blocks(d, blocks)
    powers, into = constants(decay, d.dtype)
    y = d.new_empty((x.shape[0] + 1, BLOCK))  # a row more, so that a piece of 16 may begin at the last token
    torch.mm(x, powers, out=y[:-1])
    y[-1] = 0
    if count > starts.shape[0]:
        y[:count].addcmul_(_entering(y[:count, 0], blocks, decay**BLOCK)[:, None], into)
    return out_of_blocks(y, blocks)


def _entering(heads: torch.Tensor, blocks: Blocks, decay: float) -> torch.Tensor:
    """The scanned head of the next block of the sequence, 0 behind the last; [N] of each block."""
    count, sequences = blocks.blocks, blocks.starts.shape[0]
    width = _round_up(int(blocks.counts.amax()) + 1, WIDTH)  # every row ends with a 0
    if sequences * width > MAX_PADDING * count + FEW:
        out = heads.new_zeros(count)
        out[:-1] = scan_ragged(with_room(heads), blocks.firsts, blocks.counts, decay)[1:]
        return out.index_fill_(0, blocks.last, 0)
    rows = in_windows(with_room(heads, width), blocks.firsts, width)
    rows.mul_(torch.arange(width, device=heads.device) < blocks.counts[:, None])
    scanned = scan_rows(rows, decay, torch.empty_like(rows))
    place = torch.arange(0, sequences * width, width, device=heads.device) - blocks.firsts
    place = torch.repeat_interleave(place, blocks.counts, output_size=count)
    return scanned.view(-1).index_select(0, place.add_(torch.arange(1, count + 1, device=heads.device)))


def fast_scan(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor | None,
    after: torch.Tensor | None,
    offsets: torch.Tensor | None,
    gamma: float,
    decay: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(carries, carries + values), both 0 where masked, shaped like rewards; None where the plain scan has to do it.

    Args:
        rewards: [T] with offsets [S+1], or [B, T] without; at least one token.
        values: like rewards, or None for discounted returns (the second result is None then).
        mask: like rewards, or None.
        after: [S] value behind the last trained token, or None for 0.
        offsets: int64, of the ragged layout.
        gamma: discount of the next value.
        decay: gamma times lambda.
        dtype: of the result.
    """
    scan = Scan(gamma, decay, dtype)
    marks = None if mask is None else as_bytes(mask)
    if offsets is None:
        found = _scan_padded(rewards, values, marks, after, scan)
        if found is not None:
            return found
        length = rewards.shape[1]
        offsets = torch.arange(0, rewards.numel() + 1, length, device=rewards.device)
    flat_values, flat_marks = (None if x is None else x.reshape(-1) for x in (values, marks))
    found = _scan_flat(rewards.reshape(-1), flat_values, flat_marks, after, offsets, scan)
    if found is None:
        return None
    carries, returns = found
    return carries.view(rewards.shape), None if returns is None else returns.view(rewards.shape)


def _scan_padded(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    marks: torch.Tensor | None,
    after: torch.Tensor | None,
    scan: Scan,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Rows [R, T] whose trained tokens are prefixes; None if some are not, or a value is not finite."""
    rows, length = rewards.shape
    width = _round_up(length, WIDTH)
    step = min(rows, max(1, GROUP * torch.get_num_threads() // width))
    carries = rewards.new_empty((rows, length), dtype=scan.dtype)
    returns = None if values is None else torch.empty_like(carries)
    d, y = rewards.new_zeros((step, width), dtype=scan.dtype), rewards.new_empty((step, width), dtype=scan.dtype)
    m = None if marks is None else rewards.new_empty((step, length), dtype=scan.dtype)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        n = part.stop - start
        inside = None
        if marks is not None and m is not None:
            if not _are_prefixes(marks[part]):
                return None
            inside = m[:n].copy_(marks[part])
        delta = d[:n, :length]
        times(rewards[part], inside, delta)
        if values is not None and returns is not None:
            v = times(values[part], inside, returns[part])
            delta.sub_(v)
            delta[:, :-1].add_(v[:, 1:], alpha=scan.gamma)
            if after is not None:
                _add_after(delta, inside, scan.gamma * after[part])
        target = carries[part] if width == length else y[:n]
        found = scan_rows(d[:n], scan.decay, target)[:, :length]
        if width != length:
            carries[part] = found
        if returns is not None:
            returns[part].add_(found)
        # a triangular product multiplies non-finite values by 0: they would reach tokens behind them
        if not math.isfinite(float(found.sum())):
            return None
    return carries, returns


def _are_prefixes(marks: torch.Tensor) -> bool:
    """True when no token [R, T] is trained behind one that is not."""
    begins = marks[:, 1:] > marks[:, :-1]
    return begins.numel() == 0 or int(begins.view(torch.uint8).amax()) == 0


def _add_after(delta: torch.Tensor, inside: torch.Tensor | None, after: torch.Tensor) -> None:
    """delta [R, T] += after [R] at the last trained token of each row."""
    if inside is None:
        delta[:, -1] += after
        return
    last = inside.clone()
    last[:, :-1].addcmul_(inside[:, :-1], inside[:, 1:], value=-1)
    delta.addcmul_(last, after[:, None])


def _scan_flat(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    marks: torch.Tensor | None,
    after: torch.Tensor | None,
    offsets: torch.Tensor,
    scan: Scan,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Ragged sequences [T], a group of whole ones at a time; None if a value is not finite."""
    carries = rewards.new_empty(rewards.shape, dtype=scan.dtype)
    returns = None if values is None else torch.empty_like(carries)
    for sequences, part in _groups(offsets):
        found = _scan_trained(
            rewards[part],
            _of(values, part),
            _of(marks, part),
            _of(after, sequences),
            offsets[sequences.start : sequences.stop + 1] - part.start,
            scan,
            carries[part],
            _of(returns, part),
        )
        if not found:
            return None
    return carries, returns


def _of(x: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if x is None else x[part]


def _groups(offsets: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(sequences, tokens) of groups of whole sequences of about GROUP tokens."""
    total, count = int(offsets[-1]), offsets.shape[0] - 1
    size = GROUP * torch.get_num_threads()
    if total <= size:
        yield slice(0, count), slice(0, total)
        return
    wanted = torch.arange(size, total, size, device=offsets.device)
    borders = [0, *torch.unique(torch.searchsorted(offsets, wanted)).tolist(), count]
    tokens = offsets[borders].tolist()
    for i in range(len(borders) - 1):
        if tokens[i + 1] > tokens[i]:
            yield slice(borders[i], borders[i + 1]), slice(tokens[i], tokens[i + 1])


def _scan_trained(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    marks: torch.Tensor | None,
    after: torch.Tensor | None,
    offsets: torch.Tensor,
    scan: Scan,
    carries: torch.Tensor,
    returns: torch.Tensor | None,
) -> bool:
    """Fill carries and returns [T] of a group of sequences; False if a value is not finite."""
    where = None
    if marks is not None and int(marks.amin()) == 0:
        where = marks.nonzero().squeeze(1)
        offsets = torch.searchsorted(where, offsets)
        carries.zero_()
        if returns is not None:
            returns.zero_()
        if not where.numel():
            return True
    r, v = (x if x is None or where is None else x.index_select(0, where) for x in (rewards, values))
    assert r is not None
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    if int(lengths.amin()) == 0:
        some = lengths.nonzero().squeeze(1)
        starts, lengths = starts[some], lengths[some]
        after = None if after is None else after[some]
    d = r.new_zeros(r.shape[0] + BLOCK, dtype=scan.dtype)
    delta = d[:-BLOCK]
    if v is None:
        delta.copy_(r)
    else:
        r, v = r.to(scan.dtype), v.to(scan.dtype)
        torch.sub(r, v, out=delta)
        last = starts + lengths - 1
        at_end = delta.index_select(0, last)
        delta[:-1].add_(v[1:], alpha=scan.gamma)
        delta.index_copy_(0, last, at_end if after is None else at_end.add_(scan.gamma * after))
    y = scan_ragged(d, starts, lengths, scan.decay)
    if not math.isfinite(float(y.sum())):
        return False
    if where is None:
        carries.copy_(y)
        if returns is not None and v is not None:
            torch.add(y, v, out=returns)
    else:
        carries.scatter_(0, where, y)
        if returns is not None and v is not None:
            returns.scatter_(0, where, v.add_(y))
    return True
