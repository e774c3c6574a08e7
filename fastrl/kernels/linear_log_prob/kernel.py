"""The head with Triton passes over each chunk's logits; the three products stay the library's."""

from __future__ import annotations

from typing import Any

import torch

from ..log_prob.kernel import gradient_of_rows_triton, statistics_of_rows_triton
from ..log_prob.reference import RowStatistics
from .chunks import RowKernels
from .reference import linear_log_prob_backward_reference, linear_log_prob_reference

LOGITS_IN_CHUNK = 1 << 28  # 512 MiB in bfloat16: enough rows for efficient products, few beside the weights
ROWS = (512, 4096)  # fewest and most rows of a chunk


def _chunk_rows(dtype: torch.dtype, vocabulary: int) -> int:
    return min(max(LOGITS_IN_CHUNK // vocabulary // 256 * 256, ROWS[0]), ROWS[1])


TRITON = RowKernels(statistics_of_rows_triton, gradient_of_rows_triton, _chunk_rows)


def linear_log_prob_triton(*args: Any) -> RowStatistics:
    """Same arguments and results as `linear_log_prob_reference`."""
    return linear_log_prob_reference(*args, TRITON)


def linear_log_prob_backward_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same arguments and results as `linear_log_prob_backward_reference`."""
    return linear_log_prob_backward_reference(*args, TRITON)
