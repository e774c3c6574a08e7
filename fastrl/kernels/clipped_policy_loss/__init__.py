"""The clipped ratio loss (https://arxiv.org/abs/1707.06347; dual clip https://arxiv.org/abs/1912.09729)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..aggregation import Count, resolve_scale
from ..chain import chain
from ..checks import check_choice, check_float, check_layout, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op
from .reference import STATS, clipped_policy_loss_reference

COUNT = len(STATS) + 1  # where the number of tokens stands in the summed statistics


class PolicyLoss(NamedTuple):
    """`loss` is a scalar (reduction "sum") or like log_prob ("none"); `stats` are detached."""

    loss: torch.Tensor
    stats: dict[str, torch.Tensor]


def _fake(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_token, want_gradient = rest[-2:]
    dtype = accumulate_dtype(log_prob, old_log_prob, advantages)
    loss = log_prob.new_empty(log_prob.shape if per_token else (), dtype=dtype)
    stats = log_prob.new_empty((len(STATS), *log_prob.shape) if per_token else (COUNT + 1,), dtype=dtype)
    return loss, stats, log_prob.new_empty(log_prob.shape if want_gradient else (0,), dtype=dtype)


_op = define_op(
    "clipped_policy_loss",
    "(Tensor log_prob, Tensor old_log_prob, Tensor advantages, Tensor? mask, Tensor? weights, Tensor? scale, "
    "Tensor? cu_seqlens, float clip_low, float clip_high, float dual_clip, float max_ratio, bool per_token, "
    "bool want_gradient) -> (Tensor, Tensor, Tensor)",
    reference=clipped_policy_loss_reference,
    kernel="fastrl.kernels.clipped_policy_loss.kernel:clipped_policy_loss_triton",
    fake=_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    log_prob, scale, per_token = inputs[0], inputs[5], inputs[11]
    _, stats, gradient = output
    ctx.dtype = log_prob.dtype
    ctx.divide = scale is None and not per_token
    ctx.save_for_backward(gradient, stats[COUNT] if ctx.divide else None)


def _backward(ctx: Any, upstream: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
    gradient, count = ctx.saved_tensors
    return chain(gradient, upstream, count).to(ctx.dtype), *(None,) * 12


_op.register_autograd(_backward, setup_context=_setup)


def clipped_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    max_ratio: float | None = None,
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
) -> PolicyLoss:
    """The clipped ratio loss with its gradient and statistics in one pass.

        rho = exp(clamp(log_prob - old_log_prob, -20, 20))
        l_t = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));   A < 0: l_t = min(l_t, -A dual_clip)
        loss = sum_s scale_s sum_t m w l                                 reduction "sum"
        loss_t = m w l                                                   reduction "none"

    Gradients flow to log_prob only. Values outside the mask change nothing, NaN included.

    Args:
        log_prob: [T] or [B, T] float, of the policy now.
        old_log_prob: like log_prob, of the policy at the start of the update.
        advantages: like log_prob.
        mask: like log_prob, nonzero where the token counts; None: everywhere.
        clip_low: in [0, 1); the ratio is clipped below at 1 - clip_low.
        clip_high: >= 0; the ratio is clipped above at 1 + clip_high.
        dual_clip: > 1, bound of the loss over |A| for negative advantages; None: off.
        max_ratio: >= 1 + clip_high, cap of the ratio in the unclipped term; None: off.
        weights: like log_prob, detached factor of each token; None: 1.
        loss_agg_mode, num_tokens, num_sequences, num_prompts, group_id, loss_scale_factor, scale: as in `aggregate`.
        reduction: "sum" for the aggregated loss, "none" for the token losses, neither scaled nor divided.
        cu_seqlens: [S+1] int32 or int64 offsets of the ragged layout; None: [B, T], or any shape where sequences play
            no part.

    Returns:
        PolicyLoss(loss, stats). stats are clip_high, clip_low, clip_dual (1 where that bound cuts the gradient), k1 =
        old - new and k3 = rho - 1 - log rho (both estimate KL(old || new)), ratio: per token for "none"; masked means
        and also ratio_max and num_tokens for "sum". float32 (float64 if an input is).

    Raises:
        ValueError: a shape, dtype, device or option that is not allowed.
        RuntimeError: a second derivative is asked for.
    """
    op = "clipped_policy_loss"
    check_tensor(op, "log_prob", log_prob)
    check_tensor(op, "old_log_prob", old_log_prob, shape=log_prob.shape, device=log_prob.device)
    check_tensor(op, "advantages", advantages, shape=log_prob.shape, device=log_prob.device)
    check_mask(op, mask, log_prob)
    low = check_float(op, "clip_low", clip_low, low=0, high=1, open_high=True)
    high = check_float(op, "clip_high", clip_high, low=0)
    dual = float("inf") if dual_clip is None else check_float(op, "dual_clip", dual_clip, low=1, open_low=True)
    cap = float("inf") if max_ratio is None else check_float(op, "max_ratio", max_ratio, low=1 + high)
    check_choice(op, "reduction", reduction, ("sum", "none"))
    if weights is not None:
        check_tensor(op, "weights", weights, shape=log_prob.shape, device=log_prob.device)
        weights = weights.detach()
    if cu_seqlens is not None:
        check_layout(op, "log_prob", log_prob, cu_seqlens)
    per_token = reduction == "none"
    if per_token or (scale is None and loss_agg_mode == "token-mean" and num_tokens is None):
        scale = None
    else:
        scale = resolve_scale(
            op,
            log_prob,
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
    want_gradient = log_prob.requires_grad and torch.is_grad_enabled()
    data = (old_log_prob.detach(), advantages.detach(), mask, weights, scale, cu_seqlens)
    loss, stats, _ = _op(log_prob, *data, low, high, dual, cap, per_token, want_gradient)
    names = STATS if per_token else (*STATS, "ratio_max", "num_tokens")
    return PolicyLoss(loss, dict(zip(names, stats.detach().unbind(0), strict=True)))
