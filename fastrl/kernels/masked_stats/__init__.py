"""Sum, count, mean, variance, minimum and maximum over a mask, overall or per sequence, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..checks import check_layout, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .cpu import masked_stats_cpu
from .reference import masked_stats_reference


class MaskedStats(NamedTuple):
    """Statistics over the mask, each [] or [S].

    Without a single value inside the mask: sum, count, mean, var 0, min +inf, max -inf (what merges with other ranks').
    """

    sum: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]
    mean: torch.Tensor
    var: torch.Tensor
    min: torch.Tensor
    max: torch.Tensor


def _fake(
    x: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, per_sequence: bool, ddof: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences,) if per_sequence else ()
    total, mean, var, low, high = (x.new_empty(shape, dtype=accumulate_dtype(x)) for _ in range(5))
    return total, x.new_empty(shape, dtype=torch.int64), mean, var, low, high


_op = define_op(
    "masked_stats",
    "(Tensor x, Tensor? mask, Tensor? cu_seqlens, bool per_sequence, int ddof) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=masked_stats_reference,
    cpu=masked_stats_cpu,
    kernel="fastrl.kernels.masked_stats.kernel:masked_stats_triton",
    fake=_fake,
)


def masked_stats(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    per_sequence: bool | None = None,
    ddof: int = 1,
) -> MaskedStats:
    """Statistics of the values inside the mask.

        mean = sum / count,   var = sum (x - mean)^2 / (count - ddof)

    Data, not a loss: no gradient flows (`aggregate` is the differentiable reduction).

    Args:
        x: float; any shape overall, [T] with cu_seqlens or [B, T] per sequence.
        mask: like x, nonzero where x counts; None: everywhere.
        cu_seqlens: [S+1] int32 or int64 offsets of the ragged layout.
        per_sequence: one result per sequence; None: exactly if cu_seqlens is given.
        ddof: 0 or 1, subtracted from the count in the variance.

    Returns:
        MaskedStats(sum, count, mean, var, min, max), each [] or [S]; count int64, the rest float32 (float64 if x is).

    Raises:
        ValueError: a shape, dtype, device or option that is not allowed.
    """
    check_tensor("masked_stats", "x", x)
    check_mask("masked_stats", mask, x)
    if ddof not in (0, 1):
        raise ValueError(f"masked_stats: ddof = {ddof!r}: use 0 or 1")
    by_sequence = cu_seqlens is not None if per_sequence is None else per_sequence
    if by_sequence or cu_seqlens is not None:
        check_layout("masked_stats", "x", x, cu_seqlens)
    return MaskedStats(*_op(x.detach(), mask, cu_seqlens, by_sequence, int(ddof)))
