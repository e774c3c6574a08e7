"""The head in chunks of rows: product, row statistics; and its gradient by doing the product again.

`RowKernels` is what runs on the logits of one chunk: the torch reference here, Triton on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..dispatch import accumulate_dtype
from ..log_prob.reference import (
    RowOptions,
    RowStatistics,
    empty_statistics,
    gradient_of_rows,
    statistics_of_rows,
    weighted_of_rows,
)
from ..scratch import scratch
from .gemm import add_bias_gradient, add_weight_gradient, hidden_gradient, project

# Bytes of logits that exist at a time on a CPU, by the bytes of an element: 128 rows of 49152 in float32; 512 in
# bfloat16 (which pays for each chunk's sum into a float32 d weight); more rows of a smaller vocabulary
CHUNK_BYTES = {4: 24 << 20, 2: 48 << 20}
FEWEST_ROWS = 64


def chunk_rows_cpu(dtype: torch.dtype, vocabulary: int) -> int:
    """Rows of a chunk, as many as fit in the memory that the logits of one may take."""
    size = CHUNK_BYTES.get(dtype.itemsize, CHUNK_BYTES[4])
    return max(size // (dtype.itemsize * vocabulary), FEWEST_ROWS)


class RowKernels(NamedTuple):
    """The passes over a chunk's logits, with the signatures of `log_prob.reference`, and how many rows a chunk has."""

    statistics: Callable[..., RowStatistics] = statistics_of_rows
    gradient: Callable[..., torch.Tensor] = gradient_of_rows
    weighted: Callable[..., None] = weighted_of_rows
    chunk_rows: Callable[[torch.dtype, int], int] = chunk_rows_cpu


REFERENCE = RowKernels()


class Head(NamedTuple):
    """Operands in the compute dtype, and what becomes of the logits. One label and hidden row per logits row."""

    hidden: torch.Tensor  # [N, H]
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    labels: torch.Tensor  # [N]
    options: RowOptions

    def chunk(self, part: slice) -> Head:
        """The same head for some of the rows; hidden rows whose label is ignored become 0 (they may hold anything)."""
        labels = self.labels[part]
        hidden = self.hidden[part]
        ignored = labels == self.options.ignore_index
        if hidden.device.type != "cpu" or bool(ignored.any()):
            hidden = hidden.masked_fill(ignored.unsqueeze(1), 0)
        temperature = self.options.temperature
        options = self.options._replace(temperature=None if temperature is None else temperature.reshape(-1)[part])
        return self._replace(hidden=hidden, labels=labels, options=options)


def make_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: RowOptions,
    dtype: torch.dtype,
) -> Head:
    """The operands cast to the compute dtype (a weight in another dtype is copied once for all chunks)."""
    if not hidden.is_contiguous():
        hidden = hidden.contiguous()
    return Head(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), labels, options)


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows, as equal as they can be: a short last one would waste a product's tiles."""
    number = -(-count // size) if count else 0
    for i in range(number):
        yield slice(count * i // number, count * (i + 1) // number)


@contextlib.contextmanager
def logits_buffer(head: Head, size: int) -> Iterator[torch.Tensor]:
    """Room for the logits of the largest chunk; rows start at multiples of 16 elements, for wide loads."""
    rows = max((part.stop - part.start for part in chunks(head.labels.shape[0], size)), default=0)
    vocabulary = head.weight.shape[0]
    with scratch((rows, -(-vocabulary // 16) * 16), head.hidden.dtype, head.hidden.device) as buffer:
        yield buffer[:, :vocabulary]


class Gradients:
    """Sums of d hidden, d weight and d bias over chunks. Each is made only where `needs` says so.

    `into`: a [V, H] tensor that d weight is added to, in place of a new one.
    """

    def __init__(
        self,
        head: Head,
        needs: tuple[bool, bool, bool],
        weight_dtype: torch.dtype,
        chunk_count: int,
        into: torch.Tensor | None = None,
    ) -> None:
        self.head = head
        vocabulary, size = head.weight.shape
        self.hidden = torch.empty_like(head.hidden) if needs[0] else None
        self.fresh = into is None
        if into is None and needs[1]:
            # one chunk needs no sum: it is rounded to the weight's dtype once, like a sum in float32 would be
            exact = head.weight.dtype if chunk_count <= 1 and weight_dtype == head.weight.dtype else None
            dtype = exact or accumulate_dtype(head.weight)
            make = torch.empty if chunk_count else torch.zeros
            into = make((vocabulary, size), dtype=dtype, device=head.weight.device)
        self.weight = into
        self.bias = (
            torch.zeros(vocabulary, dtype=accumulate_dtype(head.weight), device=head.weight.device)
            if needs[2]
            else None
        )

    def add(self, part: slice, chunk: Head, d_logits: torch.Tensor, dead: torch.Tensor | None) -> None:
        """Take in the gradient of one chunk's logits [C, V]; `dead` [C]: rows that carry none and may hold NaN."""
        if self.hidden is not None:
            hidden_gradient(d_logits, self.head.weight, self.hidden[part])
        if self.weight is not None:
            hidden = chunk.hidden if dead is None else chunk.hidden.masked_fill(dead.unsqueeze(1), 0)
            add_weight_gradient(self.weight, d_logits, hidden, self.fresh)
            self.fresh = False
        if self.bias is not None:
            add_bias_gradient(self.bias, d_logits)


def dead_rows(grad_log_prob: torch.Tensor, grad_entropy: torch.Tensor | None) -> torch.Tensor | None:
    """Rows without any gradient, [C] bool; None where a CPU can see that there are none."""
    dead = grad_log_prob == 0
    if grad_entropy is not None:
        dead &= grad_entropy == 0
    return None if dead.device.type == "cpu" and not bool(dead.any()) else dead


def forward_in_chunks(
    head: Head, kernels: RowKernels, want_entropy: bool, want_sum_sq: bool, chunk_size: int
) -> RowStatistics:
    """Statistics of all rows; at most `chunk_size` rows of logits exist at a time."""
    count, size = head.labels.shape[0], chunk_size or kernels.chunk_rows(head.hidden.dtype, head.weight.shape[0])
    out = empty_statistics(count, head.hidden, want_entropy, want_sum_sq)
    with logits_buffer(head, size) as buffer:
        for part in chunks(count, size):
            chunk = head.chunk(part)
            logits = project(chunk.hidden, chunk.weight, chunk.bias, buffer[: chunk.labels.shape[0]])
            kernels.statistics(logits, chunk.labels, chunk.options, out.rows(part))
    return out


def backward_in_chunks(
    head: Head,
    kernels: RowKernels,
    statistics: RowStatistics,
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype,
    chunk_size: int,
) -> Gradients:
    """Gradients to hidden, weight and bias: each chunk's logits are made again and turned into their gradient."""
    size = chunk_size or kernels.chunk_rows(head.hidden.dtype, head.weight.shape[0])
    parts = list(chunks(head.labels.shape[0], size))
    total = Gradients(head, needs, weight_dtype, len(parts))
    with logits_buffer(head, size) as buffer:
        for part in parts:
            chunk = head.chunk(part)
            logits = project(chunk.hidden, chunk.weight, chunk.bias, buffer[: chunk.labels.shape[0]])
            g, h = grad_log_prob[part], None if grad_entropy is None else grad_entropy[part]
            kernels.gradient(logits, chunk.labels, chunk.options, statistics.rows(part), g, h, logits)
            total.add(part, chunk, logits, dead_rows(g, h))
    return total
