"""Scores relative to the other samples of their group."""

from __future__ import annotations

import torch

from ..checks import FLOATS, INTEGERS, check_choice, check_float, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .cpu import group_normalize_cpu
from .reference import group_normalize_reference


def _fake(
    scores: torch.Tensor,
    group_id: torch.Tensor,
    valid: torch.Tensor | None,
    scale_std: bool,
    leave_one_out: bool,
    ddof: int,
    eps: float,
) -> torch.Tensor:
    return scores.new_empty(scores.shape, dtype=accumulate_dtype(scores))


_op = define_op(
    "group_normalize",
    "(Tensor scores, Tensor group_id, Tensor? valid, bool scale_std, bool leave_one_out, int ddof, float eps) "
    "-> Tensor",
    reference=group_normalize_reference,
    cpu=group_normalize_cpu,
    kernel="fastrl.kernels.group_normalize.kernel:group_normalize_triton",
    fake=_fake,
)


def group_normalize(
    scores: torch.Tensor,
    group_id: torch.Tensor,
    *,
    scale: str = "std",
    baseline: str = "mean",
    ddof: int = 1,
    eps: float = 1e-6,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each score minus its group's baseline, divided by its group's spread.

        A_i = (s_i - baseline_g) / (std_g + eps)        scale = "std"
        A_i =  s_i - baseline_g                         scale = "none"

    baseline "mean" is the group mean, "leave_one_out" the mean of the *other* samples, (s_i - mean) n / (n - 1). A
    group of one gets 0. A group without spread (range <= 1e-6 max(1, max |s|)) gets exactly 0. Data, not a loss: no
    gradient flows. Variances are two-pass.

    Args:
        scores: [S] float, one per sample.
        group_id: [S] integer, any values in any order, groups of any size.
        scale: "std" or "none".
        baseline: "mean" or "leave_one_out".
        ddof: 0 or 1, subtracted from the group size in the variance.
        eps: added to the standard deviation, >= 0.
        valid: [S], nonzero for samples that count; the others get 0 and change nothing. None: all count.

    Returns:
        [S] float32 (float64 if scores is).

    Raises:
        ValueError: a shape, dtype, device or option that is not allowed.
    """
    name = "group_normalize"
    check_tensor(name, "scores", scores, dtypes=FLOATS, ndim=1)
    check_tensor(name, "group_id", group_id, dtypes=INTEGERS, shape=scores.shape, device=scores.device)
    check_choice(name, "scale", scale, ("std", "none"))
    check_choice(name, "baseline", baseline, ("mean", "leave_one_out"))
    if ddof not in (0, 1):
        raise ValueError(f"{name}: ddof = {ddof!r}: use 0 or 1")
    eps = check_float(name, "eps", eps, low=0)
    check_mask(name, valid, scores, "valid")
    return _op(scores.detach(), group_id, valid, scale == "std", baseline == "leave_one_out", int(ddof), eps)
