"""Any token-level loss on logits in memory; its gradient, made in the forward, takes the logits' place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..checks import check_float, check_label_values, check_tensor
from ..linear_token_loss import check_token_loss, multiply_upstream, row_kernels, take_kept
from ..linear_token_loss.reference import TokenLoss
from ..log_prob import LogProbs
from ..log_prob.arguments import check_labels, check_logit_options, check_temperature
from ..log_prob.reference import RowOptions, as_row_groups
from .reference import LogitsLoss, logits_loss

_OP = "logits_token_loss"
_CONSUMED = "_fastrl_gradient_at_version"  # on a logits tensor: its version when a gradient took the logits' place


class _LogitsLoss(torch.autograd.Function):
    """Keeps the gradient that the forward wrote, and multiplies it by the upstream gradient, once."""

    @staticmethod
    def forward(ctx: Any, logits: Any, gradient: Any, names: list[str], run: Callable[[], LogitsLoss]) -> Any:
        result = run()
        ctx.kept = gradient
        rows = result.rows
        others = (rows.log_prob, rows.entropy, rows.sum_sq, *result.stats.values())
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        names.extend(result.stats)
        return result.loss, *others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Any, *unused: Any) -> Any:
        kept = take_kept(ctx, _OP)
        if upstream is not None:
            kept = multiply_upstream(kept, upstream, ctx.kept is None)
        return None if upstream is None else kept, None, None, None


def _overlaps(x: torch.Tensor) -> bool:
    """True when two elements share memory (an expanded tensor): nothing can be written there."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride()))


def _gradient_room(logits: torch.Tensor, inplace: bool) -> torch.Tensor:
    """The tensor that the gradient is written to: an alias of the logits where that is asked for and possible."""
    alias = logits.detach()
    writable = not _overlaps(alias) and (alias.numel() == 0 or as_row_groups(alias).data_ptr() == alias.data_ptr())
    if inplace and writable:
        return alias
    return torch.empty_like(alias, memory_format=torch.contiguous_format)


def logits_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    token_loss_fn: TokenLoss,
    *,
    inplace: bool = True,
    temperature: float | torch.Tensor = 1.0,
    want_entropy: bool = False,
    want_sum_sq: bool = False,
    ignore_index: int = -100,
    logit_scale: float | None = None,
    logit_softcap: float | None = None,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, LogProbs, dict[str, torch.Tensor]]:
    """Sum of a token loss over rows of logits, with the gradient of the logits made in the forward.

        loss = sum_t token_loss_fn(log_prob, entropy, slice)_t,   log_prob and entropy as in `log_prob`

    Args:
        logits: [..., V] float, any strides. With `inplace`, and where a gradient is needed, the gradient replaces
            them: an operation that saved them for its own backward then raises autograd's error.
        labels: [...] integer, the sampled tokens.
        token_loss_fn: as in `linear_token_loss`, called with slices of the rows in the order of labels.reshape(-1); or
            weights [...].
        inplace: False leaves the logits alone and takes as much memory again. (Logits with overlapping elements are
            left alone anyway.)
        temperature: positive number, or [...] float; no gradient flows to it.
        want_entropy: give entropy to the callback and in the result.
        want_sum_sq: also give the sum of squared probabilities in the result.
        ignore_index: rows with this label give log_prob 0 and no gradient, and are not read.
        logit_scale: factor of the logits; None: 1.
        logit_softcap: cap of the logits; None: none.
        chunk_size: rows per call of the callback; None: chosen for the device.

    Returns:
        (loss [], LogProbs shaped like labels, detached, {name: [N]} detached). Under `torch.no_grad` the logits stay.

    Raises:
        ValueError: a shape, dtype, device or value that is not allowed, also in what the callback returns.
        RuntimeError: in a second backward, or when the logits have been replaced by a gradient already.
    """
    check_tensor(_OP, "logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{_OP}: logits has shape {list(logits.shape)}: [..., V] with V >= 1 is needed")
    check_labels(_OP, labels, logits.shape[:-1], logits.device)
    token_loss = check_token_loss(_OP, token_loss_fn, labels)
    if chunk_size is not None:
        check_float(_OP, "chunk_size", chunk_size, low=1)
    if getattr(logits, _CONSUMED, None) == logits._version:
        raise RuntimeError(f"{_OP}: these logits have been replaced by their gradient: compute them again")
    check_label_values(_OP, labels, logits.shape[-1], ignore_index)
    per_row, number = check_temperature(_OP, temperature, labels.shape, logits.device)
    options = RowOptions(per_row, number, *check_logit_options(_OP, logit_scale, logit_softcap), ignore_index)
    gradient = _gradient_room(logits, inplace) if torch.is_grad_enabled() and logits.requires_grad else None
    detached = logits.detach()

    def run() -> LogitsLoss:
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            return logits_loss(
                detached, labels.reshape(-1), token_loss, options, row_kernels(logits), gradient,
                want_entropy, want_sum_sq, chunk_size or 0,
            )  # fmt: skip

    names: list[str] = []
    loss, value, entropy, sum_sq, *stats = _LogitsLoss.apply(logits, gradient, names, run)
    if gradient is not None and gradient.data_ptr() == logits.data_ptr():
        torch.autograd.graph.increment_version(logits)
        setattr(logits, _CONSUMED, logits._version)
    rows = LogProbs(
        value.view(labels.shape),
        entropy.view(labels.shape) if want_entropy else None,
        sum_sq.view(labels.shape) if want_sum_sq else None,
    )
    return loss, rows, dict(zip(names, stats))
