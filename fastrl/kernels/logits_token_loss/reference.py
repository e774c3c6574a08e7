"""A token loss on logits in memory: statistics, the callback's derivative, and the gradient of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..linear_log_prob.chunks import RowKernels, chunks
from ..linear_token_loss.reference import TokenLoss, join_stats, loss_of_rows
from ..log_prob.reference import RowOptions, RowStatistics, as_row_groups, empty_statistics


class LogitsLoss(NamedTuple):
    """loss [], statistics of all rows [N], stats {name: [N]}; the gradient is in the tensor given for it."""

    loss: torch.Tensor
    rows: RowStatistics
    stats: dict[str, torch.Tensor]


def logits_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    token_loss: TokenLoss,
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
    in_place = written is not None and written.data_ptr() == groups.data_ptr()
    rows = empty_statistics(labels.shape[0], logits, want_entropy, want_sum_sq)
    size = chunk_size or kernels.chunk_rows(logits.dtype, logits.shape[-1])
    width, losses, stats = groups.shape[1], [], []
    for index in range(groups.shape[0]):
        for part in chunks(width, size):
            whole = slice(index * width + part.start, index * width + part.stop)
            temperature = None if options.temperature is None else options.temperature.reshape(-1)[whole]
            mine, chosen = rows.rows(whole), options._replace(temperature=temperature)
            rows_of_chunk = groups[index, part]
            out = None if written is None else rows_of_chunk if in_place else written[index, part]
            result = loss_of_rows(
                "logits_token_loss", kernels, rows_of_chunk, labels[whole], chosen, mine, token_loss, whole, out
            )
            losses.append(result.loss)
            stats.append(result.stats)
    loss = torch.stack(losses).sum() if losses else rows.log_prob.new_zeros(())
    return LogitsLoss(loss, rows, join_stats(stats))
