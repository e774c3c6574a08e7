"""Aggregation in Triton: lengths of sequences, their scales, the masked scaled sum (one launch) and its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import launch
from ..checks import check_cu_seqlens_values
from ..device import is_last_to_arrive, load_float, row_bounds, trained_tokens
from ..dispatch import on_device_of
from ..rows import arrivals, flat, flat_mask, row_length, scale_arguments
from ..token_sum import column_sum, token_scale
from .reference import MODES


@triton.jit(do_not_specialize=["row_length", "total"])
def lengths_kernel(
    mask, lengths, cu_seqlens, row_length, total,
    HAS_MASK: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens inside the mask of each sequence; one program a sequence."""
    row = tl.program_id(0)
    start, end = row_bounds(cu_seqlens, row, row_length, total, RAGGED)
    count = tl.maximum(end - start, 0)
    if HAS_MASK:
        count = count * 0
        first = start // BLOCK
        for i in range(tl.where(end > start, (end - 1) // BLOCK - first + 1, 0)):
            at = (first + i) * BLOCK
            t = at + tl.arange(0, BLOCK)
            if at + BLOCK <= total:
                count += tl.sum(trained_tokens(mask, t, start, end, total, True, True).to(tl.int32), axis=0)
            else:
                count += tl.sum(trained_tokens(mask, t, start, end, total, True, False).to(tl.int32), axis=0)
    tl.store(lengths + row, count)


@triton.jit(do_not_specialize=["sequences"])
def group_tokens_kernel(lengths, group_id, tokens, firsts, sequences, BLOCK: tl.constexpr):
    """tokens [S] of each sequence's group; firsts [S]: 1 where the sequence is the first of a group with tokens."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    some = mine < sequences
    ids = tl.load(group_id + mine, mask=some, other=0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.int32)
    for at in range(0, sequences, BLOCK):
        other = at + tl.arange(0, BLOCK)
        inside = other < sequences
        theirs = tl.load(group_id + other, mask=inside, other=0).to(tl.int64)
        length = tl.load(lengths + other, mask=inside, other=0).to(tl.float32)
        same = (ids[:, None] == theirs[None, :]) & inside[None, :]
        total += tl.sum(tl.where(same, length[None, :], 0.0), axis=1)
        before += tl.sum((same & (other[None, :] < mine[:, None])).to(tl.int32), axis=1)
    tl.store(tokens + mine, total, mask=some)
    tl.store(firsts + mine, ((before == 0) & (total > 0)).to(tl.float32), mask=some)


@triton.jit
def _inverse(x):
    """1 / x, and 0 where x is 0."""
    return tl.where(x > 0, 1.0 / tl.where(x > 0, x, 1.0), 0.0)


@triton.jit(do_not_specialize=["sequences"])
def scale_kernel(
    lengths, tokens, firsts, count, scale, sequences, factor,
    MODE: tl.constexpr, HAS_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """scale [S]; MODE: place in MODES. Every program counts for itself, then writes its own block."""
    lane = tl.arange(0, BLOCK)
    if HAS_COUNT:
        whole = tl.load(count).to(tl.float32)
    else:
        acc = tl.zeros([BLOCK], tl.float32)
        for at in range(0, sequences, BLOCK):
            i = at + lane
            if MODE == 5:
                acc += tl.load(firsts + i, mask=i < sequences, other=0.0)
            else:
                length = tl.load(lengths + i, mask=i < sequences, other=0).to(tl.float32)
                if MODE == 0:
                    acc += length
                else:
                    acc += (length > 0).to(tl.float32)
        whole = tl.sum(acc, axis=0)
    mine = tl.program_id(0) * BLOCK + lane
    some = mine < sequences
    out = tl.zeros([BLOCK], tl.float32) + _inverse(whole)
    if MODE == 1:
        out = out * 0 + 1
    if MODE == 3:
        out = out / factor
    if MODE == 4:
        out = out * _inverse(tl.load(lengths + mine, mask=some, other=0).to(tl.float32))
    if MODE == 5:
        out = out * _inverse(tl.load(tokens + mine, mask=some, other=0.0))
    tl.store(scale + mine, out, mask=some)


@triton.jit
def _weighted(
    token_loss, mask, weights, scale, cu_seqlens, at, total, row_length, sequences, steps,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of m w l scale over one block."""
    t = at + tl.arange(0, BLOCK)
    inside = trained_tokens(mask, t, 0, total, total, HAS_MASK, FULL)
    value = tl.where(inside, load_float(token_loss, t, total, FULL), 0.0)
    factor = token_scale(scale, cu_seqlens, t, total, row_length, sequences, steps, SCALE, FULL)
    if HAS_WEIGHTS:
        factor = tl.where(inside, factor * load_float(weights, t, total, FULL), 0.0)
    return tl.sum(value * factor, axis=0)


@triton.jit(do_not_specialize=["total", "row_length", "sequences", "steps"])
def aggregate_kernel(
    token_loss, mask, weights, scale, cu_seqlens, partials, out, counter, total, row_length, sequences, steps,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums; the last program to arrive adds them in order."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK
    if at + BLOCK <= total:
        part = _weighted(
            token_loss, mask, weights, scale, cu_seqlens, at, total, row_length, sequences, steps,
            HAS_MASK, HAS_WEIGHTS, SCALE, True, BLOCK,
        )  # fmt: skip
    else:
        part = _weighted(
            token_loss, mask, weights, scale, cu_seqlens, at, total, row_length, sequences, steps,
            HAS_MASK, HAS_WEIGHTS, SCALE, False, BLOCK,
        )  # fmt: skip
    tl.store(partials + program, part)
    programs = tl.num_programs(0)
    if is_last_to_arrive(counter, programs):
        tl.store(out, column_sum(partials, 0, programs, BLOCK))


@triton.jit
def _gradient(
    upstream, mask, weights, scale, cu_seqlens, out, at, total, row_length, sequences, steps,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = at + tl.arange(0, BLOCK)
    inside = trained_tokens(mask, t, 0, total, total, HAS_MASK, FULL)
    factor = token_scale(scale, cu_seqlens, t, total, row_length, sequences, steps, SCALE, FULL) * upstream
    if HAS_WEIGHTS:
        factor = factor * load_float(weights, t, total, FULL)
    value = tl.where(inside, factor, 0.0).to(out.dtype.element_ty)
    if FULL:
        tl.store(out + t, value)
    else:
        tl.store(out + t, value, mask=t < total)


@triton.jit(do_not_specialize=["total", "row_length", "sequences", "steps"])
def aggregate_backward_kernel(
    upstream, mask, weights, scale, cu_seqlens, out, total, row_length, sequences, steps,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = upstream m w scale, in the dtype of the token loss."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    up = tl.load(upstream).to(tl.float32)
    if at + BLOCK <= total:
        _gradient(
            up, mask, weights, scale, cu_seqlens, out, at, total, row_length, sequences, steps,
            HAS_MASK, HAS_WEIGHTS, SCALE, True, BLOCK,
        )  # fmt: skip
    else:
        _gradient(
            up, mask, weights, scale, cu_seqlens, out, at, total, row_length, sequences, steps,
            HAS_MASK, HAS_WEIGHTS, SCALE, False, BLOCK,
        )  # fmt: skip


def sequence_lengths_triton(
    like: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Same arguments and results as `sequence_lengths_reference`."""
    check_cu_seqlens_values("aggregate", cu_seqlens, like.numel())
    rows = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    lengths = torch.empty(rows, dtype=torch.int64, device=like.device)
    if rows:
        config = launch.config("lengths", like)
        offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
        with on_device_of(like):
            lengths_kernel[(rows,)](
                flat_mask(mask), lengths, offsets, row_length(like, cu_seqlens), like.numel(),
                HAS_MASK=mask is not None, RAGGED=offsets is not None, **config,
            )  # fmt: skip
    return lengths


def aggregation_scale_triton(
    lengths: torch.Tensor,
    group_id: torch.Tensor | None,
    count: torch.Tensor | None,
    mode: str,
    factor: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Same arguments and results as `aggregation_scale_reference`."""
    scale = torch.empty(lengths.shape, dtype=torch.float32, device=lengths.device)
    sequences = lengths.numel()
    if sequences:
        lengths = lengths.contiguous()
        tokens, firsts = torch.empty_like(scale), torch.empty_like(scale)
        with on_device_of(lengths):
            if mode == "prompt-mean":
                assert group_id is not None
                config = launch.config("group_tokens", lengths)
                group_tokens_kernel[(triton.cdiv(sequences, config["BLOCK"]),)](
                    lengths, group_id.contiguous(), tokens, firsts, sequences, **config
                )
            config = launch.config("scale", lengths)
            scale_kernel[(triton.cdiv(sequences, config["BLOCK"]),)](
                lengths, tokens, firsts, count, scale, sequences, factor,
                MODE=MODES.index(mode), HAS_COUNT=count is not None, **config,
            )  # fmt: skip
    return scale.to(dtype)


def aggregate_triton(
    token_loss: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Same arguments and results as `aggregate_reference`."""
    check_cu_seqlens_values("aggregate", cu_seqlens, token_loss.numel())
    total = token_loss.numel()
    if total == 0:
        return torch.zeros((), dtype=torch.float32, device=token_loss.device)
    out = torch.empty((), dtype=torch.float32, device=token_loss.device)
    config = launch.config("aggregate", token_loss)
    programs = triton.cdiv(total, config["BLOCK"])
    partials = torch.empty(programs, dtype=torch.float32, device=token_loss.device)
    (scale_, offsets, length, sequences, steps), kind = scale_arguments(token_loss, scale, cu_seqlens)
    data = (flat(token_loss), flat_mask(mask), None if weights is None else flat(weights), scale_, offsets)
    with on_device_of(token_loss):
        aggregate_kernel[(programs,)](
            *data, partials, out, arrivals(token_loss.device), total, length, sequences, steps,
            HAS_MASK=mask is not None, HAS_WEIGHTS=weights is not None, SCALE=kind, **config,
        )  # fmt: skip
    return out


def aggregate_backward_triton(
    upstream: torch.Tensor,
    token_loss: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Same arguments and results as the reference: m w scale times the upstream gradient, in token_loss's dtype."""
    out = torch.empty(token_loss.shape, dtype=token_loss.dtype, device=token_loss.device)
    if out.numel():
        config = launch.config("aggregate", token_loss)
        (scale_, offsets, length, sequences, steps), kind = scale_arguments(token_loss, scale, cu_seqlens)
        data = (flat_mask(mask), None if weights is None else flat(weights), scale_, offsets)
        with on_device_of(token_loss):
            aggregate_backward_kernel[(triton.cdiv(out.numel(), config["BLOCK"]),)](
                upstream, *data, out, out.numel(), length, sequences, steps,
                HAS_MASK=mask is not None, HAS_WEIGHTS=weights is not None, SCALE=kind, **config,
            )  # fmt: skip
    return out
