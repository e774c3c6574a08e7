"""Ragged sequences in blocks of 16 tokens, and back: contiguous copies, without an index per token.

Blocks begin where sequences begin; the last block of a sequence is filled up with zeros. A copy of 16 tokens that
begin anywhere is one row of the view of all windows of 16 tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

BLOCK, SHIFT = 16, 4  # tokens, and its logarithm: integer division is three times as slow as a shift
# BLAS products of fewer rows, or of another remainder, may sum in another order
ROW_MULTIPLE = 4


@functools.lru_cache(maxsize=64)
def constants(decay: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(powers [from, to]: decay^(from - to) or 0, into [to]: decay^(16 - to), what a carry is multiplied by)."""
    with torch.inference_mode(False):
        distance = torch.arange(BLOCK, device="cpu")[:, None] - torch.arange(BLOCK, device="cpu")
        powers = torch.where(distance >= 0, decay ** distance.clamp(min=0).to(dtype), 0.0)
        return powers, decay ** torch.arange(BLOCK, 0, -1, device="cpu", dtype=dtype)


@functools.cache
def _first_ones(dtype: torch.dtype) -> torch.Tensor:
    """[17, 16]: row n has n ones and then zeros."""
    with torch.inference_mode(False):
        return torch.ones(BLOCK + 1, BLOCK, device="cpu", dtype=dtype).tril(-1)


def in_windows(flat: torch.Tensor, begin: torch.Tensor, size: int = BLOCK) -> torch.Tensor:
    """[N, size]: the elements of contiguous `flat` from each place in `begin` [N] on, all of which exist."""
    return flat.as_strided((flat.shape[0] - size + 1, size), (1, 1)).index_select(0, begin)


def with_room(x: torch.Tensor, size: int = BLOCK) -> torch.Tensor:
    """`x` [T] with `size` zeros behind it."""
    out = x.new_empty(x.shape[0] + size)
    out[: x.shape[0]] = x
    out[x.shape[0] :] = 0
    return out


class Blocks(NamedTuple):
    """Sequences that are not empty, back to back, in blocks. Numbers of tokens and blocks are int64 [S]."""

    starts: torch.Tensor  # first token of each sequence; the first is 0
    counts: torch.Tensor  # blocks of each sequence
    firsts: torch.Tensor  # first block of each sequence
    last: torch.Tensor  # last block of each sequence
    filled: torch.Tensor  # tokens in the last block, 1 .. 16
    shift: torch.Tensor  # from a token's place in the batch to its place in the blocks
    tokens: int
    blocks: int

    @staticmethod
    def of(starts: torch.Tensor, lengths: torch.Tensor, tokens: int) -> Blocks:
        """From the starts and lengths [S] of the sequences of a flat batch."""
        counts = (lengths + (BLOCK - 1)) >> SHIFT
        ends = counts.cumsum(0)
        firsts, last = ends - counts, ends - 1
        filled = lengths - ((counts - 1) << SHIFT)
        return Blocks(starts, counts, firsts, last, filled, (firsts << SHIFT) - starts, tokens, int(ends[-1]))


def into_blocks(d: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[N, 16] of d [T + 16]; N is the number of blocks rounded up to a multiple of 4, the rows behind hold anything."""
    count = blocks.blocks
    begin = torch.arange(0, BLOCK * (-(-count // ROW_MULTIPLE) * ROW_MULTIPLE), BLOCK, device="cpu")
    begin[:count] -= torch.repeat_interleave(blocks.shift, blocks.counts, output_size=count)
    begin[count:] = 0
    x = in_windows(d, begin)
    tails = x.index_select(0, blocks.last).mul_(_first_ones(d.dtype).index_select(0, blocks.filled))
    return x.index_copy_(0, blocks.last, tails)


def out_of_blocks(y: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[T] from y [N + 1, 16]: pieces of 16 tokens are copied as one; those where a sequence begins are put together."""
    flat, starts, shift = y.view(-1), blocks.starts, blocks.shift
    pieces = -(-blocks.tokens // BLOCK)
    begin = torch.arange(0, BLOCK * pieces, BLOCK, device="cpu")
    if starts.shape[0] == 1:
        return in_windows(flat, begin).view(-1)[: blocks.tokens]
    # the first piece that begins inside each sequence, or behind it; how many do
    border = torch.nn.functional.pad((starts + (BLOCK - 1)) >> SHIFT, (0, 1), value=pieces)
    begin += torch.repeat_interleave(shift, border[1:] - border[:-1], output_size=pieces)
    out = in_windows(flat, begin)
    # in a piece, every start of a sequence changes the shift of the tokens from there on
    starts = starts[1:]
    mixed, rank = torch.unique_consecutive(starts >> SHIFT, return_inverse=True)
    jumps = starts.new_zeros(mixed.shape[0] << SHIFT)
    # a piece that begins with a sequence has that one's shift already
    jump = (shift[1:] - shift[:-1]) * ((starts & (BLOCK - 1)) != 0)
    jumps.index_add_(0, (rank << SHIFT) + (starts & (BLOCK - 1)), jump)
    place = jumps.view(-1, BLOCK).cumsum(1).add_(begin.index_select(0, mixed)[:, None])
    place.add_(torch.arange(BLOCK, device="cpu")).clamp_(max=flat.shape[0] - 1)  # some are behind the last token
    out.index_copy_(0, mixed, flat.index_select(0, place.view(-1)).view(-1, BLOCK))
    return out.view(-1)[: blocks.tokens]
