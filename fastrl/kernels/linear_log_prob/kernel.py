"""The head with Triton passes over each chunk's logits; the three products stay the library's."""

from __future__ import annotations

from functools import partial

import torch

from ..log_prob.kernel import gradient_of_rows_triton, statistics_of_rows_triton, weighted_rows_triton
from .chunks import RowKernels
from .reference import linear_log_prob_backward_reference, linear_log_prob_reference

LOGITS_IN_CHUNK = 1 << 28  # 512 MiB in bfloat16: enough rows for efficient products, few beside the weights
ROWS = (512, 4096)  # fewest and most rows of a chunk


def _chunk_rows(dtype: torch.dtype, vocabulary: int) -> int:
    return min(max(LOGITS_IN_CHUNK // vocabulary // 256 * 256, ROWS[0]), ROWS[1])


TRITON = RowKernels(statistics_of_rows_triton, gradient_of_rows_triton, weighted_rows_triton, _chunk_rows)


# the ops' arguments and results are those of the reference
linear_log_prob_triton = partial(linear_log_prob_reference, kernels=TRITON)
linear_log_prob_backward_triton = partial(linear_log_prob_backward_reference, kernels=TRITON)
