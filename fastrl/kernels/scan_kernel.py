"""Advantages and discounted returns in Triton: one affine scan per sequence, from its end.

The carry that token t hands to the token before it is c_t = gamma (V_t + lambda A_t) where t is trained and c_{t+1}
elsewhere; so c_t = a_t c_{t+1} + b_t with a = gamma lambda, b = gamma V + gamma lambda (r - V) (trained) or 1, 0. The
advantage is A_t = r_t - V_t + c_{t+1}. Discounted returns: V = 0, lambda = 1.

A block is [ROWS, 16] tokens: a thread owns 16 neighbours (16-byte loads, of the mask too) and composes them in
registers by halving; rows stand in reverse order, so that a forward scan over them runs from the end of the sequence
and needs no flip of the lanes. Blocks are aligned in the flat batch, so that loads are wide wherever sequences start.
When sequences are few and long there are two launches: the map of every chunk, then each chunk with the maps of the
chunks behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .device import load_float, row_bounds, trained_tokens
from .dispatch import on_device_of
from .rows import flat, flat_mask, row_length

WIDTH = tl.constexpr(16)  # neighbouring tokens of a thread


@triton.jit
def compose(later_a, later_b, a, b):
    """The affine map c -> a c + b applied after the map of the later tokens (a scan hands those in first)."""
    return a * later_a, a * later_b + b


@triton.jit
def compose_with_entry(later_a, later_b, later_u, later_v, a, b, u, v):
    """As `compose`; u c + v is the carry that enters the earliest part."""
    return a * later_a, a * later_b + b, u * later_a, u * later_b + v


@triton.jit
def _halve(a, b, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Compose neighbours: (maps of pairs [ROWS, HALF], maps of the later one of each pair)."""
    early_a, late_a = tl.split(tl.reshape(a, [ROWS, HALF, 2]))
    early_b, late_b = tl.split(tl.reshape(b, [ROWS, HALF, 2]))
    pair_a, pair_b = compose(late_a, late_b, early_a, early_b)
    return pair_a, pair_b, late_a, late_b


@triton.jit
def _double(carry, late_a, late_b, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Carry that enters each pair [ROWS, HALF] -> carry that enters each member [ROWS, 2 HALF]."""
    return tl.reshape(tl.join(late_a * carry + late_b, carry), [ROWS, 2 * HALF])


@triton.jit
def _tokens(at, ROWS: tl.constexpr):
    """Token numbers [ROWS, 16] of a block: the last row holds the first tokens."""
    row = ROWS - 1 - tl.arange(0, ROWS)
    return at + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _decay_of(gamma, gae_lambda, lambdas, row, PER_SEQUENCE: tl.constexpr):
    if PER_SEQUENCE:
        decay = gamma * tl.load(lambdas + row).to(tl.float32)
    else:
        decay = gamma * gae_lambda
    return decay


@triton.jit
def _block_terms(
    rewards, values, mask, at, start, end, total, gamma, decay,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(trained, value, entry, a, b) of a block's tokens, each [ROWS, 16]."""
    t = _tokens(at, ROWS)
    trained = trained_tokens(mask, t, start, end, total, HAS_MASK, FULL)
    reward = load_float(rewards, t, total, FULL)
    a = tl.where(trained, decay, 1.0)
    if HAS_VALUES:
        value = load_float(values, t, total, FULL)
        entry = tl.where(trained, reward - value, 0.0)
        b = tl.where(trained, gamma * value + decay * entry, 0.0)
    else:
        value = reward
        entry = tl.where(trained, reward, 0.0)
        b = decay * entry
    return trained, value, entry, a, b


@triton.jit
def _block_map(
    rewards, values, mask, at, start, end, total, gamma, decay,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The map (a, b) of a whole block."""
    _, _, _, a, b = _block_terms(
        rewards, values, mask, at, start, end, total, gamma, decay, HAS_MASK, HAS_VALUES, FULL, ROWS
    )
    a, b, _, _ = _halve(a, b, ROWS, 8)
    a, b, _, _ = _halve(a, b, ROWS, 4)
    a, b, _, _ = _halve(a, b, ROWS, 2)
    a, b, _, _ = _halve(a, b, ROWS, 1)
    a, b = tl.associative_scan((tl.reshape(a, [ROWS]), tl.reshape(b, [ROWS])), 0, compose)
    last = tl.arange(0, ROWS) == ROWS - 1
    return tl.sum(tl.where(last, a, 0.0), axis=0), tl.sum(tl.where(last, b, 0.0), axis=0)


@triton.jit
def _write_block(
    rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the block's results and return the carry in front of it."""
    trained, value, entry, a, b = _block_terms(
        rewards, values, mask, at, start, end, total, gamma, decay, HAS_MASK, HAS_VALUES, FULL, ROWS
    )
    a, b, late_a8, late_b8 = _halve(a, b, ROWS, 8)
    a, b, late_a4, late_b4 = _halve(a, b, ROWS, 4)
    a, b, late_a2, late_b2 = _halve(a, b, ROWS, 2)
    a, b, late_a1, late_b1 = _halve(a, b, ROWS, 1)
    a, b = tl.reshape(a, [ROWS]), tl.reshape(b, [ROWS])
    one, zero = tl.full([ROWS], 1.0, tl.float32), tl.full([ROWS], 0.0, tl.float32)
    a, b, u, v = tl.associative_scan((a, b, one, zero), 0, compose_with_entry)
    into = tl.reshape(u * carry + v, [ROWS, 1])
    into = _double(into, late_a1, late_b1, ROWS, 1)
    into = _double(into, late_a2, late_b2, ROWS, 2)
    into = _double(into, late_a4, late_b4, ROWS, 4)
    into = _double(into, late_a8, late_b8, ROWS, 8)
    advantage = tl.where(trained, entry + into, 0.0)
    t = _tokens(at, ROWS)
    if WHOLE:
        tl.store(advantages + t, advantage)
    else:
        tl.store(advantages + t, advantage, mask=(t >= start) & (t < end))
    if HAS_VALUES:
        result = tl.where(trained, advantage + value, 0.0)
        if WHOLE:
            tl.store(returns + t, result)
        else:
            tl.store(returns + t, result, mask=(t >= start) & (t < end))
    return tl.sum(tl.where(tl.arange(0, ROWS) == ROWS - 1, a * carry + b, 0.0), axis=0)


@triton.jit
def _write_range(
    rewards, values, mask, advantages, returns, first, blocks, start, end, total, gamma, decay, carry,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks first + blocks - 1, ..., first of one sequence."""
    BLOCK: tl.constexpr = ROWS * WIDTH
    for i in range(blocks):
        at = (first + blocks - 1 - i) * BLOCK
        if at + BLOCK <= total:
            if (at >= start) & (at + BLOCK <= end):
                carry = _write_block(
                    rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
                    HAS_MASK, HAS_VALUES, True, True, ROWS,
                )  # fmt: skip
            else:
                carry = _write_block(
                    rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
                    HAS_MASK, HAS_VALUES, True, False, ROWS,
                )  # fmt: skip
        else:
            carry = _write_block(
                rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
                HAS_MASK, HAS_VALUES, False, False, ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["row_length", "total"])
def scan_rows_kernel(
    rewards, values, mask, advantages, returns, cu_seqlens, lambdas, bootstrap, row_length, total, gamma, gae_lambda,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, RAGGED: tl.constexpr, PER_SEQUENCE: tl.constexpr,
    BOOTSTRAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a sequence."""
    row = tl.program_id(0)
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    if start >= end:
        return
    decay = _decay_of(gamma, gae_lambda, lambdas, row, PER_SEQUENCE)
    carry = gamma * 0.0
    if BOOTSTRAP:
        carry = gamma * tl.load(bootstrap + row).to(tl.float32)
    first = start // (ROWS * WIDTH)
    blocks = (end - 1) // (ROWS * WIDTH) - first + 1
    _write_range(
        rewards, values, mask, advantages, returns, first, blocks, start, end, total, gamma, decay, carry,
        HAS_MASK, HAS_VALUES, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_length", "total", "chunks"])
def scan_chunk_maps_kernel(
    rewards, values, mask, maps, cu_seqlens, lambdas, row_length, total, chunks, gamma, gae_lambda,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, RAGGED: tl.constexpr, PER_SEQUENCE: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """maps [rows, chunks, 2]: how each chunk of a sequence turns the carry behind it into the carry in front."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    BLOCK: tl.constexpr = ROWS * WIDTH
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    decay = _decay_of(gamma, gae_lambda, lambdas, row, PER_SEQUENCE)
    first = start // BLOCK + chunk * CHUNK_BLOCKS
    past = tl.minimum(tl.where(end > start, (end - 1) // BLOCK + 1, 0), first + CHUNK_BLOCKS)
    whole_a = gamma * 0.0 + 1.0
    whole_b = gamma * 0.0
    for i in range(tl.maximum(past - first, 0)):
        at = (past - 1 - i) * BLOCK
        if at + BLOCK <= total:
            a, b = _block_map(
                rewards, values, mask, at, start, end, total, gamma, decay, HAS_MASK, HAS_VALUES, True, ROWS
            )
        else:
            a, b = _block_map(
                rewards, values, mask, at, start, end, total, gamma, decay, HAS_MASK, HAS_VALUES, False, ROWS
            )
        whole_a, whole_b = compose(whole_a, whole_b, a, b)
    place = maps + (row.to(tl.int64) * chunks + chunk) * 2
    tl.store(place, whole_a)
    tl.store(place + 1, whole_b)


@triton.jit(do_not_specialize=["row_length", "total", "chunks"])
def scan_chunks_kernel(
    rewards, values, mask, advantages, returns, maps, cu_seqlens, lambdas, bootstrap, row_length, total, chunks, gamma,
    gae_lambda,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, RAGGED: tl.constexpr, PER_SEQUENCE: tl.constexpr,
    BOOTSTRAP: tl.constexpr, CHUNK_BLOCKS: tl.constexpr, MAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a sequence."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    BLOCK: tl.constexpr = ROWS * WIDTH
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    if start >= end:
        return
    first = start // BLOCK + chunk * CHUNK_BLOCKS
    past = tl.minimum((end - 1) // BLOCK + 1, first + CHUNK_BLOCKS)
    if past <= first:
        return
    decay = _decay_of(gamma, gae_lambda, lambdas, row, PER_SEQUENCE)
    carry = gamma * 0.0
    if BOOTSTRAP:
        carry = gamma * tl.load(bootstrap + row).to(tl.float32)
    # maps of the chunks behind this one, the last first
    lane = tl.arange(0, MAPS)
    behind = chunks - 1 - lane
    place = maps + (row.to(tl.int64) * chunks + behind) * 2
    a = tl.load(place, mask=behind > chunk, other=1.0)
    b = tl.load(place + 1, mask=behind > chunk, other=0.0)
    a, b = tl.associative_scan((a, b), 0, compose)
    carry = tl.sum(tl.where(lane == MAPS - 1, a * carry + b, 0.0), axis=0)
    _write_range(
        rewards, values, mask, advantages, returns, first, past - first, start, end, total, gamma, decay, carry,
        HAS_MASK, HAS_VALUES, ROWS,
    )  # fmt: skip


def launch_scan(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor | None,
    bootstrap: torch.Tensor | None,
    lambdas: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(advantages, returns), or (discounted returns, None) without values."""
    advantages = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    returns = None if values is None else torch.empty_like(advantages)
    total = rewards.numel()
    if total == 0:
        return advantages, returns
    rows = rewards.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    length = row_length(rewards, cu_seqlens)
    config = launch.config("scan", rewards, total // rows)
    few_rows, chunk_tokens = config.pop("SPLIT_ROWS"), config["CHUNK_BLOCKS"] * config["ROWS"] * 16
    if cu_seqlens is not None:
        # how long the longest sequence is only the device knows: the grid covers `total` for each
        few_rows //= 8
    data = (flat(rewards), None if values is None else flat(values), flat_mask(mask))
    offsets, lambdas, bootstrap = (None if x is None else x.contiguous() for x in (cu_seqlens, lambdas, bootstrap))
    flags = {
        "HAS_MASK": mask is not None,
        "HAS_VALUES": values is not None,
        "RAGGED": offsets is not None,
        "PER_SEQUENCE": lambdas is not None,
    }
    with on_device_of(rewards):
        if rows <= few_rows and total // rows >= 2 * chunk_tokens:
            longest = length if offsets is None else total
            chunks = triton.cdiv(longest, chunk_tokens) + 1
            maps = torch.empty(rows, chunks, 2, dtype=torch.float32, device=rewards.device)
            scan_chunk_maps_kernel[(rows, chunks)](
                *data, maps, offsets, lambdas, length, total, chunks, gamma, gae_lambda, **flags, **config
            )
            scan_chunks_kernel[(rows, chunks)](
                *data, advantages, returns, maps, offsets, lambdas, bootstrap, length, total, chunks, gamma, gae_lambda,
                **flags, BOOTSTRAP=bootstrap is not None, MAPS=triton.next_power_of_2(chunks), **config,
            )  # fmt: skip
        else:
            config.pop("CHUNK_BLOCKS")
            scan_rows_kernel[(rows,)](
                *data, advantages, returns, offsets, lambdas, bootstrap, length, total, gamma, gae_lambda,
                **flags, BOOTSTRAP=bootstrap is not None, **config,
            )  # fmt: skip
    return advantages, returns
