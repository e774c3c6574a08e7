"""Advantages and discounted returns in Triton: one affine scan per sequence, from its end.

The carry that token t hands to the token before it is c_t = gamma (V_t + lambda A_t) where t is trained and c_{t+1}
elsewhere; so c_t = a_t c_{t+1} + b_t with a = gamma lambda, b = gamma V + gamma lambda (r - V) (trained) or 1, 0. The
advantage is A_t = r_t - V_t + c_{t+1}, carried along in the same scan. Discounted returns: V = 0, lambda = 1.

Blocks are aligned to multiples of BLOCK in the flat batch, so that loads are wide wherever sequences start. When rows
are few and long, two launches: the map of every chunk, then each chunk with the composed maps of the chunks behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .device import compose, compose_with_entry, first_lane, load_float, row_bounds, trained_tokens
from .dispatch import on_device_of
from .rows import flat, flat_mask, row_length


@triton.jit
def _decays(gamma, gae_lambda, lambdas, row, PER_SEQUENCE: tl.constexpr):
    if PER_SEQUENCE:
        decay = gamma * tl.load(lambdas + row).to(tl.float32)
    else:
        decay = gamma * gae_lambda
    return decay


@triton.jit
def _block_terms(
    rewards, values, mask, at, start, end, total, gamma, decay,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(trained, value, entry, a, b) of the tokens at, ..., at + BLOCK - 1."""
    t = at + tl.arange(0, BLOCK)
    trained = trained_tokens(mask, t, start, end, total, HAS_MASK, FULL)
    reward = load_float(rewards, t, total, FULL)
    value = reward
    if HAS_VALUES:
        value = load_float(values, t, total, FULL)
        entry = tl.where(trained, reward - value, 0.0)
    else:
        entry = tl.where(trained, reward, 0.0)
    a = tl.where(trained, decay, 1.0)
    if HAS_VALUES:
        b = tl.where(trained, gamma * value + decay * entry, 0.0)
    else:
        b = decay * entry
    return trained, value, entry, a, b


@triton.jit
def _write_block(
    rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the block's results and return the carry in front of it."""
    lane = tl.arange(0, BLOCK)
    trained, value, entry, a, b = _block_terms(
        rewards, values, mask, at, start, end, total, gamma, decay, HAS_MASK, HAS_VALUES, FULL, BLOCK
    )
    a, b, u, v = tl.associative_scan((a, b, a * 0 + 1, entry), 0, compose_with_entry, reverse=True)
    advantage = tl.where(trained, u * carry + v, 0.0)
    t = at + lane
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
    return first_lane(a, lane) * carry + first_lane(b, lane)


@triton.jit
def _write_range(
    rewards, values, mask, advantages, returns, first, blocks, start, end, total, gamma, decay, carry,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks first + blocks - 1, ..., first of one sequence."""
    for i in range(blocks):
        at = (first + blocks - 1 - i) * BLOCK
        if at + BLOCK <= total:
            if (at >= start) & (at + BLOCK <= end):
                carry = _write_block(
                    rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
                    HAS_MASK, HAS_VALUES, True, True, BLOCK,
                )  # fmt: skip
            else:
                carry = _write_block(
                    rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
                    HAS_MASK, HAS_VALUES, True, False, BLOCK,
                )  # fmt: skip
        else:
            carry = _write_block(
                rewards, values, mask, advantages, returns, at, start, end, total, gamma, decay, carry,
                HAS_MASK, HAS_VALUES, False, False, BLOCK,
            )  # fmt: skip


@triton.jit
def scan_rows_kernel(
    rewards, values, mask, advantages, returns, cu_seqlens, lambdas, bootstrap, row_length, total, gamma, gae_lambda,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, RAGGED: tl.constexpr, PER_SEQUENCE: tl.constexpr,
    BOOTSTRAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a sequence."""
    row = tl.program_id(0)
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    if start >= end:
        return
    decay = _decays(gamma, gae_lambda, lambdas, row, PER_SEQUENCE)
    carry = gamma * 0.0
    if BOOTSTRAP:
        carry = gamma * tl.load(bootstrap + row).to(tl.float32)
    first = start // BLOCK
    blocks = (end - 1) // BLOCK - first + 1
    _write_range(
        rewards, values, mask, advantages, returns, first, blocks, start, end, total, gamma, decay, carry,
        HAS_MASK, HAS_VALUES, BLOCK,
    )  # fmt: skip


@triton.jit
def scan_chunk_maps_kernel(
    rewards, values, mask, maps, cu_seqlens, lambdas, row_length, total, chunks, gamma, gae_lambda,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, RAGGED: tl.constexpr, PER_SEQUENCE: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """maps [rows, chunks, 2]: how each chunk of a sequence turns the carry behind it into the carry in front."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    decay = _decays(gamma, gae_lambda, lambdas, row, PER_SEQUENCE)
    lane = tl.arange(0, BLOCK)
    first = start // BLOCK + chunk * CHUNK_BLOCKS
    past = tl.minimum(tl.where(end > start, (end - 1) // BLOCK + 1, 0), first + CHUNK_BLOCKS)
    whole_a = gamma * 0.0 + 1.0
    whole_b = gamma * 0.0
    for i in range(tl.maximum(past - first, 0)):
        at = (past - 1 - i) * BLOCK
        if at + BLOCK <= total:
            _, _, _, a, b = _block_terms(
                rewards, values, mask, at, start, end, total, gamma, decay, HAS_MASK, HAS_VALUES, True, BLOCK
            )
        else:
            _, _, _, a, b = _block_terms(
                rewards, values, mask, at, start, end, total, gamma, decay, HAS_MASK, HAS_VALUES, False, BLOCK
            )
        a, b = tl.associative_scan((a, b), 0, compose, reverse=True)
        whole_a, whole_b = compose(whole_a, whole_b, first_lane(a, lane), first_lane(b, lane))
    place = maps + (row.to(tl.int64) * chunks + chunk) * 2
    tl.store(place, whole_a)
    tl.store(place + 1, whole_b)


@triton.jit
def scan_chunks_kernel(
    rewards, values, mask, advantages, returns, maps, cu_seqlens, lambdas, bootstrap, row_length, total, chunks, gamma,
    gae_lambda,
    HAS_MASK: tl.constexpr, HAS_VALUES: tl.constexpr, RAGGED: tl.constexpr, PER_SEQUENCE: tl.constexpr,
    BOOTSTRAP: tl.constexpr, CHUNK_BLOCKS: tl.constexpr, MAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a sequence."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    if start >= end:
        return
    first = start // BLOCK + chunk * CHUNK_BLOCKS
    past = tl.minimum((end - 1) // BLOCK + 1, first + CHUNK_BLOCKS)
    if past <= first:
        return
    decay = _decays(gamma, gae_lambda, lambdas, row, PER_SEQUENCE)
    carry = gamma * 0.0
    if BOOTSTRAP:
        carry = gamma * tl.load(bootstrap + row).to(tl.float32)
    lane = tl.arange(0, MAPS)
    behind = lane + chunk + 1
    place = maps + (row.to(tl.int64) * chunks + behind) * 2
    a = tl.load(place, mask=behind < chunks, other=1.0)
    b = tl.load(place + 1, mask=behind < chunks, other=0.0)
    a, b = tl.associative_scan((a, b), 0, compose, reverse=True)
    carry = first_lane(a, lane) * carry + first_lane(b, lane)
    _write_range(
        rewards, values, mask, advantages, returns, first, past - first, start, end, total, gamma, decay, carry,
        HAS_MASK, HAS_VALUES, BLOCK,
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
    few_rows, chunk_tokens = config.pop("SPLIT_ROWS"), config["CHUNK_BLOCKS"] * config["BLOCK"]
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
