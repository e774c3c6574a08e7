"""Masked whitening: zero mean and unit variance over the tokens inside the mask."""

from __future__ import annotations

import torch

from ..checks import check_float, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .cpu import whiten_cpu
from .reference import whiten_reference


def _fake(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=accumulate_dtype(x))


_op = define_op(
    "whiten",
    "(Tensor x, Tensor? mask, Tensor? mean, Tensor? var, int ddof, float eps) -> Tensor",
    reference=whiten_reference,
    cpu=whiten_cpu,
    kernel="fastrl.kernels.whiten.kernel:whiten_triton",
    fake=_fake,
)


def _statistic(name: str, value: float | torch.Tensor | None, x: torch.Tensor, low: float) -> torch.Tensor | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        check_tensor("whiten", name, value, device=x.device)
        if value.numel() != 1:
            raise ValueError(f"whiten: {name} has shape {list(value.shape)}: one value is needed")
        return value.detach().reshape(()).to(accumulate_dtype(x))
    return torch.full((), check_float("whiten", name, value, low=low), dtype=accumulate_dtype(x), device=x.device)


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    mean: float | torch.Tensor | None = None,
    var: float | torch.Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Shift and scale the values inside the mask to zero mean and unit variance.

        y = (x - mean) / sqrt(var + eps),   mean and var (ddof) over the mask;   0 outside

    A single value is centred only. With `mean` and `var` given (reduced over ranks, say) they are used as they are.
    Data, not a loss: no gradient flows. The variance is two-pass.

    Args:
        x: float, any shape.
        mask: like x, nonzero where x counts; None: everywhere.
        mean: the mean, number or one-element tensor; give both or none.
        var: the variance, number or one-element tensor, >= 0.
        ddof: 0 or 1, subtracted from the count in the variance.
        eps: added to the variance, >= 0.

    Returns:
        like x, float32 (float64 if x is).

    Raises:
        ValueError: a shape, dtype, device or option that is not allowed.
    """
    check_tensor("whiten", "x", x)
    check_mask("whiten", mask, x)
    if (mean is None) != (var is None):
        missing = "var" if var is None else "mean"
        raise ValueError(f"whiten: {missing} = None: give mean and var together, or neither")
    if ddof not in (0, 1):
        raise ValueError(f"whiten: ddof = {ddof!r}: use 0 or 1")
    eps = check_float("whiten", "eps", eps, low=0)
    mean_t = _statistic("mean", mean, x, float("-inf"))
    var_t = _statistic("var", var, x, 0.0)
    return _op(x.detach(), mask, mean_t, var_t, int(ddof), eps)
