"""From token losses to the loss: every aggregation mode is a per-sequence scale, and there is one division."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import FLOATS, INTEGERS, check_choice, check_layout, check_mask, check_tensor
from ..dispatch import accumulate_dtype, define_op, refuse_double_backward
from .cpu import aggregate_backward_cpu, aggregate_cpu, sequence_lengths_cpu
from .reference import (
    MODES,
    aggregate_gradient,
    aggregate_reference,
    aggregation_scale_reference,
    inverse,
    sequence_lengths_reference,
)

Count = float | torch.Tensor | None

_lengths_op = define_op(
    "sequence_lengths",
    "(Tensor like, Tensor? mask, Tensor? cu_seqlens) -> Tensor",
    reference=sequence_lengths_reference,
    cpu=sequence_lengths_cpu,
    kernel="fastrl.kernels.aggregation.kernel:sequence_lengths_triton",
    fake=lambda like, mask, cu_seqlens: like.new_empty(
        like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, dtype=torch.int64
    ),
)
_scale_op = define_op(
    "aggregation_scale",
    "(Tensor lengths, Tensor? group_id, Tensor? count, str mode, float factor, ScalarType dtype) -> Tensor",
    reference=aggregation_scale_reference,
    kernel="fastrl.kernels.aggregation.kernel:aggregation_scale_triton",
    fake=lambda lengths, group_id, count, mode, factor, dtype: lengths.new_empty(lengths.shape, dtype=dtype),
)
_op = define_op(
    "aggregate",
    "(Tensor token_loss, Tensor? mask, Tensor? weights, Tensor scale, Tensor? cu_seqlens) -> Tensor",
    reference=aggregate_reference,
    cpu=aggregate_cpu,
    kernel="fastrl.kernels.aggregation.kernel:aggregate_triton",
    fake=lambda token_loss, *_: token_loss.new_empty((), dtype=accumulate_dtype(token_loss)),
)


def _backward_reference(
    upstream: torch.Tensor,
    token_loss: torch.Tensor,
    mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    gradient = aggregate_gradient(token_loss, mask, weights, scale, cu_seqlens) * upstream
    return gradient.to(token_loss.dtype)


_backward_op = define_op(
    "aggregate_backward",
    "(Tensor upstream, Tensor token_loss, Tensor? mask, Tensor? weights, Tensor scale, Tensor? cu_seqlens) -> Tensor",
    reference=_backward_reference,
    cpu=aggregate_backward_cpu,
    kernel="fastrl.kernels.aggregation.kernel:aggregate_backward_triton",
    fake=lambda upstream, token_loss, *_: torch.empty_like(token_loss, memory_format=torch.contiguous_format),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    return _backward_op(upstream, *ctx.saved_tensors), None, None, None, None


_op.register_autograd(_backward, setup_context=_setup)
refuse_double_backward(_backward_op, "aggregate")


def _count(op: str, name: str, value: Count, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """A count as a tensor [] of the dtype of the sums."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        check_tensor(op, name, value, dtypes=(*FLOATS, *INTEGERS), device=device)
        if value.numel() != 1:
            raise ValueError(f"{op}: {name} has shape {list(value.shape)}: one value is needed")
        return value.detach().reshape(()).to(dtype)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{op}: {name} = {value!r}: a count >= 0 is needed")
    return torch.full((), value, dtype=dtype, device=device)


def aggregation_scale(
    loss_agg_mode: str,
    lengths: torch.Tensor,
    *,
    num_tokens: Count = None,
    num_sequences: Count = None,
    num_prompts: Count = None,
    group_id: torch.Tensor | None = None,
    loss_scale_factor: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The scale of each sequence that turns a plain masked sum into the aggregation mode.

        loss = sum_s scale_s sum_t m l
        token-mean               1 / N_tok
        token-sum                1
        seq-mean-token-sum       1 / N_seq
        seq-mean-token-sum-norm  1 / (N_seq C)
        seq-mean-token-mean      1 / (N_seq L_s)
        prompt-mean              1 / (N_prompt x tokens of the group)

    Counts are those of the whole optimizer step on all ranks where given, else of `lengths`; N_seq counts sequences and
    N_prompt groups with at least one token. A count of 0 gives scale 0. For prompt-mean a group has to be whole in
    `lengths`.

    Args:
        loss_agg_mode: one of the modes above.
        lengths: [S] integer or float, tokens inside the loss mask.
        num_tokens: N_tok, number or one-element tensor. Counts that the mode does not use are ignored.
        num_sequences: N_seq, likewise.
        num_prompts: N_prompt, likewise.
        group_id: [S] integer, for prompt-mean.
        loss_scale_factor: C > 0 in tokens, for seq-mean-token-sum-norm.
        dtype: float32, or float64 for float64 losses.

    Returns:
        scale [S].

    Raises:
        ValueError: an unknown mode, a missing or wrong argument.
    """
    op = "aggregation_scale"
    check_choice(op, "loss_agg_mode", loss_agg_mode, MODES)
    check_tensor(op, "lengths", lengths, dtypes=(*INTEGERS, *FLOATS), ndim=1)
    factor = 1.0
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None or not 0 < loss_scale_factor < float("inf"):
            raise ValueError(
                f"{op}: loss_scale_factor = {loss_scale_factor!r}: seq-mean-token-sum-norm needs a constant > 0, "
                "for example the largest response length"
            )
        factor = float(loss_scale_factor)
    if loss_agg_mode == "prompt-mean":
        if group_id is None:
            raise ValueError(f"{op}: group_id = None: prompt-mean needs the group of each sequence, [S]")
        check_tensor(op, "group_id", group_id, dtypes=INTEGERS, shape=lengths.shape, device=lengths.device)
    name, value = {
        "token-mean": ("num_tokens", num_tokens),
        "token-sum": ("num_tokens", None),
        "prompt-mean": ("num_prompts", num_prompts),
    }.get(loss_agg_mode, ("num_sequences", num_sequences))
    count = _count(op, name, value, lengths.device, dtype)
    return _scale_op(lengths, group_id if loss_agg_mode == "prompt-mean" else None, count, loss_agg_mode, factor, dtype)


def resolve_scale(
    op: str,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    loss_agg_mode: str,
    scale: torch.Tensor | None,
    num_tokens: Count = None,
    num_sequences: Count = None,
    num_prompts: Count = None,
    group_id: torch.Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """The scale [S], or [1] for all sequences alike, of a token loss `x`; `scale` overrides the mode."""
    dtype = accumulate_dtype(x)
    if scale is not None:
        count = check_layout(op, "the token loss", x, cu_seqlens)
        check_tensor(op, "scale", scale, shape=(count,), device=x.device)
        return scale.detach().to(dtype)
    check_choice(op, "loss_agg_mode", loss_agg_mode, MODES)
    if loss_agg_mode == "token-sum":
        return torch.ones(1, dtype=dtype, device=x.device)
    if loss_agg_mode == "token-mean":
        given = _count(op, "num_tokens", num_tokens, x.device, dtype)
        if given is None:
            given = torch.full((), x.numel(), device=x.device) if mask is None else torch.count_nonzero(mask)
        return inverse(given.to(dtype)).reshape(1)
    check_layout(op, "the token loss", x, cu_seqlens)
    return aggregation_scale(
        loss_agg_mode,
        _lengths_op(x.detach(), mask, cu_seqlens),
        num_sequences=num_sequences,
        num_prompts=num_prompts,
        group_id=group_id,
        loss_scale_factor=loss_scale_factor,
        dtype=dtype,
    )


def aggregate(
    token_loss: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    loss_agg_mode: str | None = None,
    scale: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    num_tokens: Count = None,
    num_sequences: Count = None,
    num_prompts: Count = None,
    group_id: torch.Tensor | None = None,
    loss_scale_factor: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The one place where token losses are masked, weighted and divided.

        loss = sum_s scale_s sum_t m_t w_t l_t

    Values outside the mask change nothing, NaN included. An all-masked batch gives 0 with gradient 0.

    Args:
        token_loss: [T] or [B, T] float; gradients flow to it.
        mask: like token_loss, nonzero where the token counts; None: everywhere.
        loss_agg_mode: a mode of `aggregation_scale`; None: "token-mean".
        scale: [S] float, overrides the mode.
        weights: like token_loss, detached factor of each token (a correction weight); None: 1.
        num_tokens, num_sequences, num_prompts, group_id, loss_scale_factor: as in `aggregation_scale`.
        cu_seqlens: [S+1] int32 or int64 offsets of the ragged layout; None: [B, T], or any shape for the token modes.

    Returns:
        scalar, float32 (float64 if token_loss is).

    Raises:
        ValueError: an unknown mode, a shape, dtype, device or value that is not allowed.
    """
    check_tensor("aggregate", "token_loss", token_loss)
    check_mask("aggregate", mask, token_loss)
    if cu_seqlens is not None:
        check_layout("aggregate", "token_loss", token_loss, cu_seqlens)
    if weights is not None:
        check_tensor("aggregate", "weights", weights, shape=token_loss.shape, device=token_loss.device)
        weights = weights.detach()
    scale = resolve_scale(
        "aggregate",
        token_loss,
        mask,
        cu_seqlens,
        loss_agg_mode="token-mean" if loss_agg_mode is None else loss_agg_mode,
        scale=scale,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_prompts=num_prompts,
        group_id=group_id,
        loss_scale_factor=loss_scale_factor,
    )
    return _op(token_loss, mask, weights, scale, cu_seqlens)
