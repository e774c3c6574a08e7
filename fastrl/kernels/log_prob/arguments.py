"""Argument checks that every function from logits or hidden rows to log-probs shares."""

from __future__ import annotations

import torch

from ..checks import INTEGERS, check_float, check_tensor


def check_labels(op: str, labels: object, shape: torch.Size, device: torch.device) -> None:
    """Raise ValueError unless labels are integers of `shape` on `device` (values: `check_label_values`)."""
    check_tensor(op, "labels", labels, dtypes=INTEGERS, shape=shape, device=device)


def check_temperature(
    op: str, temperature: float | torch.Tensor, shape: torch.Size, device: torch.device
) -> tuple[torch.Tensor | None, float]:
    """(one temperature per row or None, one number for all): exactly one of them counts.

    Raises:
        ValueError: a number that is not positive, a tensor of another shape.
    """
    if isinstance(temperature, torch.Tensor):
        if temperature.dim() == 0:
            temperature = temperature.expand(shape)
        check_tensor(op, "temperature", temperature, shape=shape, device=device)
        return temperature.detach(), 1.0
    return None, check_float(op, "temperature", temperature, low=0, open_low=True)


def check_logit_options(op: str, logit_scale: float | None, logit_softcap: float | None) -> tuple[float, float]:
    """(logit_scale, logit_softcap) as positive numbers; a softcap of 0 means none.

    Raises:
        ValueError: a number that is not positive.
    """
    scale = 1.0 if logit_scale is None else check_float(op, "logit_scale", logit_scale, low=0, open_low=True)
    if logit_softcap is None:
        return scale, 0.0
    return scale, check_float(op, "logit_softcap", logit_softcap, low=0, open_low=True)
