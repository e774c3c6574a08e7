"""The clipped value loss of PPO's critic (https://arxiv.org/abs/1707.06347)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..aggregation import Count, resolve_scale
from ..chain import chain
from ..checks import check_choice, check_float, check_layout, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .reference import STATS, clipped_value_loss_reference

COUNT = len(STATS)  # where the number of tokens stands in the summed statistics


class ValueLoss(NamedTuple):
    """`loss` is a scalar (reduction "sum") or like values ("none"); `stats` are detached."""

    loss: torch.Tensor
    stats: dict[str, torch.Tensor]


def _fake(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_token, want_gradient = rest[-2:]
    dtype = accumulate_dtype(values, old_values, returns)
    loss = values.new_empty(values.shape if per_token else (), dtype=dtype)
    stats = values.new_empty((len(STATS), *values.shape) if per_token else (COUNT + 1,), dtype=dtype)
    return loss, stats, values.new_empty(values.shape if want_gradient else (0,), dtype=dtype)


_op = define_op(
    "clipped_value_loss",
    "(Tensor values, Tensor old_values, Tensor returns, Tensor? mask, Tensor? weights, Tensor? scale, "
    "Tensor? cu_seqlens, float value_clip, float huber_delta, bool per_token, bool want_gradient) "
    "-> (Tensor, Tensor, Tensor)",
    reference=clipped_value_loss_reference,
    kernel="fastrl.kernels.clipped_value_loss.kernel:clipped_value_loss_triton",
    fake=_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    values, scale, per_token = inputs[0], inputs[5], inputs[9]
    _, stats, gradient = output
    ctx.dtype = values.dtype
    ctx.divide = scale is None and not per_token
    ctx.save_for_backward(gradient, stats[COUNT] if ctx.divide else None)


def _backward(ctx: Any, upstream: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
    gradient, count = ctx.saved_tensors
    return chain(gradient, upstream, count).to(ctx.dtype), *(None,) * 10


_op.register_autograd(_backward, setup_context=_setup)


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    value_clip: float | None = 0.5,
    huber_delta: float | None = None,
    weights: torch.Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    num_tokens: Count = None,
    num_sequences: Count = None,
    num_prompts: Count = None,
    group_id: torch.Tensor | None = None,
    loss_scale_factor: float | None = None,
    scale: torch.Tensor | None = None,
    reduction: str = "sum",
    cu_seqlens: torch.Tensor | None = None,
) -> ValueLoss:
    """The clipped value loss with its gradient and statistics in one pass.

        l_t = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2),   c = value_clip
        loss = sum_s scale_s sum_t m w l                                   reduction "sum"
        loss_t = m w l                                                     reduction "none"

    With huber_delta the squares (halved) become Huber's function. Gradients flow to values only. Values outside the
    mask change nothing, NaN included.

    Args:
        values: [T] or [B, T] float, of the critic now.
        old_values: like values, at the start of the update.
        returns: like values, the targets.
        mask: like values, nonzero where the token counts; None: everywhere.
        value_clip: > 0, how far a value may move from its old one; None: off.
        huber_delta: > 0, error where the square turns linear; None: off.
        weights: like values, detached factor of each token; None: 1.
        loss_agg_mode, num_tokens, num_sequences, num_prompts, group_id, loss_scale_factor, scale: as in `aggregate`.
        reduction: "sum" for the aggregated loss, "none" for the token losses, neither scaled nor divided.
        cu_seqlens: [S+1] int32 or int64 offsets of the ragged layout; None: [B, T], or any shape where sequences play
            no part.

    Returns:
        ValueLoss(loss, stats). stats are clip (1 where the clipped square is larger, so the gradient is cut) and
        abs_error |v - R|: per token for "none"; masked means and also num_tokens for "sum". float32 (float64 if an
        input is).

    Raises:
        ValueError: a shape, dtype, device or option that is not allowed.
        RuntimeError: a second derivative is asked for.
    """
    op = "clipped_value_loss"
    check_tensor(op, "values", values)
    check_tensor(op, "old_values", old_values, shape=values.shape, device=values.device)
    check_tensor(op, "returns", returns, shape=values.shape, device=values.device)
    check_mask(op, mask, values)
    clip = float("inf") if value_clip is None else check_float(op, "value_clip", value_clip, low=0, open_low=True)
    delta = float("inf") if huber_delta is None else check_float(op, "huber_delta", huber_delta, low=0, open_low=True)
    check_choice(op, "reduction", reduction, ("sum", "none"))
    if weights is not None:
        check_tensor(op, "weights", weights, shape=values.shape, device=values.device)
        weights = weights.detach()
    if cu_seqlens is not None:
        check_layout(op, "values", values, cu_seqlens)
    per_token = reduction == "none"
    if per_token or (scale is None and loss_agg_mode == "token-mean" and num_tokens is None):
        scale = None
    else:
        scale = resolve_scale(
            op,
            values,
            mask,
            cu_seqlens,
            loss_agg_mode=loss_agg_mode,
            scale=scale,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_prompts=num_prompts,
            group_id=group_id,
            loss_scale_factor=loss_scale_factor,
        )
    want_gradient = values.requires_grad and torch.is_grad_enabled()
    data = (old_values.detach(), returns.detach(), mask, weights, scale, cu_seqlens)
    loss, stats, _ = _op(values, *data, clip, delta, per_token, want_gradient)
    names = STATS if per_token else (*STATS, "num_tokens")
    return ValueLoss(loss, dict(zip(names, stats.detach().unbind(0), strict=True)))
