"""A token loss on logits in memory: statistics, the callback's derivative, and the gradient of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..linear_log_prob.chunks import RowKernels, chunks
from ..linear_token_loss.reference import TokenLossFn, call_token_loss, join_stats
from ..log_prob.reference import RowOptions, RowStatistics, as_row_groups, empty_statistics


class LogitsLoss(NamedTuple):
    """loss [], statistics of all rows [N], stats {name: [N]}; the gradient is in the tensor given for it."""

    loss: torch.Tensor
    rows: RowStatistics
    stats: dict[str, torch.Tensor]


def logits_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    token_loss_fn: TokenLossFn,
    options: RowOptions,
    kernels: RowKernels,
    gradient: torch.Tensor | None,
    want_entropy: bool,
    want_sum_sq: bool,
    chunk_size: int,
) -> LogitsLoss:
    """Loss of logits [..., V] with labels [N]; `gradient`, like logits or logits itself, receives their gradient."""
    groups = as_row_groups(logits)
    written = None if gradient is None else gradient.view(groups.shape)  # contiguous, or strided like the logits
    rows = empty_statistics(labels.shape[0], logits, want_entropy, want_sum_sq)
    size = chunk_size or kernels.chunk_rows(logits.dtype, logits.shape[-1])
    width, losses, stats = groups.shape[1], [], []
    for index in range(groups.shape[0]):
        for part in chunks(width, size):
            whole = slice(index * width + part.start, index * width + part.stop)
            temperature = None if options.temperature is None else options.temperature.reshape(-1)[whole]
            mine, chosen = rows.rows(whole), options._replace(temperature=temperature)
            kernels.statistics(groups[index, part], labels[whole], chosen, mine)
            entropy = mine.entropy if want_entropy else None
            result = call_token_loss(
                "logits_token_loss", token_loss_fn, mine.log_prob, entropy, whole, gradient is not None
            )
            losses.append(result.loss)
            stats.append(result.stats)
            if written is not None and result.grad_log_prob is not None:
                g, h = result.grad_log_prob, result.grad_entropy
                kernels.gradient(groups[index, part], labels[whole], chosen, mine, g, h, written[index, part])
    loss = torch.stack(losses).sum() if losses else rows.log_prob.new_zeros(())
    return LogitsLoss(loss, rows, join_stats(stats))
