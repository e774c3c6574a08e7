"""A token loss and its gradient in one pass over the head: the gradient is made where the logits are, in the forward.

Every normaliser of a token-level loss is known before the forward, so the loss of a chunk of rows can be differentiated
while its logits are in memory: 6NHV floating-point operations in place of the 8NHV of making the logits twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..linear_log_prob.chunks import Gradients, Head, RowKernels, chunks, dead_rows, logits_buffer
from ..linear_log_prob.gemm import project
from ..log_prob.reference import RowOptions, RowStatistics, empty_statistics

TokenLossFn = Callable[[torch.Tensor, "torch.Tensor | None", slice], Any]
TokenLoss = TokenLossFn | torch.Tensor  # or weights [N]: the loss is weights x log_prob


class ChunkLoss(NamedTuple):
    """What a callback gave for one chunk: its summed loss, statistics [C], gradients [C] to log_prob and entropy."""

    loss: torch.Tensor
    stats: dict[str, torch.Tensor]
    grad_log_prob: torch.Tensor | None
    grad_entropy: torch.Tensor | None


class HeadLoss(NamedTuple):
    """The whole call: loss [], statistics of all rows, stats {name: [N]}, gradients (None without them)."""

    loss: torch.Tensor
    rows: RowStatistics
    stats: dict[str, torch.Tensor]
    gradients: Gradients | None


def call_token_loss(
    op: str,
    token_loss_fn: TokenLossFn,
    log_prob: torch.Tensor,
    entropy: torch.Tensor | None,
    part: slice,
    want_gradient: bool,
) -> ChunkLoss:
    """Run the callback on leaves [C] and differentiate its loss.

    Raises:
        ValueError: the callback returned something else than a [C] loss, or (loss, {name: [C]}).
    """
    count = log_prob.shape[0]
    with torch.set_grad_enabled(want_gradient):
        leaf = log_prob.detach().requires_grad_(want_gradient)
        other = None if entropy is None else entropy.detach().requires_grad_(want_gradient)
        result = token_loss_fn(leaf, other, part)
        loss, stats = result if isinstance(result, tuple) else (result, {})
        _check_result(op, loss, stats or {}, count)
        total = loss.sum()
        if not want_gradient:
            return ChunkLoss(total, _detached(stats), None, None)
        g = h = None
        if total.requires_grad:
            leaves = [leaf] if other is None else [leaf, other]
            g, *more = torch.autograd.grad(total, leaves, allow_unused=True)
            h = more[0] if more else None
    return ChunkLoss(total.detach(), _detached(stats), torch.zeros_like(log_prob) if g is None else g, h)


def _detached(stats: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in (stats or {}).items()}


def _check_result(op: str, loss: Any, stats: Any, count: int) -> None:
    if not isinstance(loss, torch.Tensor) or loss.shape != (count,):
        got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"{op}: token_loss_fn returned a loss of shape {got}: one loss per row, [{count}], is needed")
    for name, value in stats.items():
        if not isinstance(value, torch.Tensor) or value.shape != (count,):
            got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{op}: token_loss_fn returned stats[{name!r}] of shape {got}: [{count}] is needed")


def join_stats(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """{name: [N]} from the chunks' {name: [C]}."""
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def loss_of_rows(
    op: str,
    kernels: RowKernels,
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: RowOptions,
    mine: RowStatistics,
    token_loss: TokenLoss,
    part: slice,
    out: torch.Tensor | None,
) -> ChunkLoss:
    """Fill the statistics `mine` of rows `part` from their logits; with `out`, write the logits' gradient there."""
    if isinstance(token_loss, torch.Tensor):
        weights = token_loss[part]
        if out is logits and not mine.entropy.numel() and not mine.sum_sq.numel():
            kernels.weighted(logits, labels, options, weights, mine.log_prob)
            return ChunkLoss(_weighted(weights, mine.log_prob).sum(), {}, weights, None)
    kernels.statistics(logits, labels, options, mine)
    entropy = mine.entropy if mine.entropy.numel() else None
    function = _linear_loss(token_loss) if isinstance(token_loss, torch.Tensor) else token_loss
    result = call_token_loss(op, function, mine.log_prob, entropy, part, out is not None)
    if out is not None:
        kernels.gradient(logits, labels, options, mine, result.grad_log_prob, result.grad_entropy, out)
    return result


def _weighted(weights: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    return torch.where(weights == 0, 0.0, weights.to(log_prob.dtype) * log_prob)  # 0 x -inf is 0 here


def _linear_loss(weights: torch.Tensor) -> TokenLossFn:
    return lambda log_prob, entropy, part: _weighted(weights[part], log_prob)


def head_loss(
    head: Head,
    token_loss: TokenLoss,
    kernels: RowKernels,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype,
    want_entropy: bool,
    want_sum_sq: bool,
    chunk_size: int,
    weight_grad: torch.Tensor | None = None,
) -> HeadLoss:
    """Loss, row statistics and gradients of all chunks; see `fastrl.kernels.linear_token_loss`."""
    count, size = head.labels.shape[0], chunk_size or kernels.chunk_rows(head.hidden.dtype, head.weight.shape[0])
    rows = empty_statistics(count, head.hidden, want_entropy, want_sum_sq)
    parts = list(chunks(count, size))
    want_gradient = any(needs) or weight_grad is not None
    total = Gradients(head, needs, weight_dtype, len(parts), weight_grad) if want_gradient else None
    losses, stats = [], []
    with logits_buffer(head, size) as buffer:
        for part in parts:
            chunk = head.chunk(part)
            logits = project(chunk.hidden, chunk.weight, chunk.bias, buffer[: chunk.labels.shape[0]])
            out = None if total is None else logits
            mine = rows.rows(part)
            result = loss_of_rows(
                "linear_token_loss", kernels, logits, chunk.labels, chunk.options, mine, token_loss, part, out
            )
            losses.append(result.loss)
            stats.append(result.stats)
            if total is not None and result.grad_log_prob is not None:
                total.add(part, chunk, logits, dead_rows(result.grad_log_prob, result.grad_entropy))
    loss = torch.stack(losses).sum() if losses else rows.log_prob.new_zeros(())
    return HeadLoss(loss, rows, join_stats(stats), total)
