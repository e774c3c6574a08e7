"""Log-probs of a language-model head that never holds all logits; the backward makes them again."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_float, check_tensor
from ..dispatch import accumulate_dtype, define_op, refuse_double_backward
from ..log_prob import LogProbs
from ..log_prob.arguments import check_labels, check_logit_options, check_temperature
from .gemm import compute_dtype
from .reference import linear_log_prob_backward_reference, linear_log_prob_reference

_OPERANDS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? temperature, float temperature_value, "
    "float logit_scale, float logit_softcap, int ignore_index"
)


def _fake(hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    want_entropy, want_sum_sq, count = rest[8], rest[9], hidden.shape[0]
    dtype = accumulate_dtype(hidden)
    wanted = (True, want_entropy, want_sum_sq, True, True)
    return tuple(hidden.new_empty(count if w else 0, dtype=dtype) for w in wanted)


def _fake_backward(
    grad_log_prob: torch.Tensor, grad_entropy: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:
    need_hidden, need_weight, need_bias = rest[9:12]
    return (
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
        (hidden if bias is None else bias).new_empty(bias.shape if need_bias and bias is not None else (0,)),
    )


_op = define_op(
    "linear_log_prob",
    f"({_OPERANDS}, bool want_entropy, bool want_sum_sq, int chunk_size, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=linear_log_prob_reference,
    kernel="fastrl.kernels.linear_log_prob.kernel:linear_log_prob_triton",
    fake=_fake,
)
_backward_op = define_op(
    "linear_log_prob_backward",
    f"(Tensor grad_log_prob, Tensor? grad_entropy, {_OPERANDS}, Tensor entropy, Tensor row_max, Tensor log_sum, "
    "bool need_hidden, bool need_weight, bool need_bias, int chunk_size, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    reference=linear_log_prob_backward_reference,
    kernel="fastrl.kernels.linear_log_prob.kernel:linear_log_prob_backward_triton",
    fake=_fake_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    hidden, weight, bias, labels, temperature, *numbers = inputs
    ctx.numbers, (ctx.want_entropy, _, ctx.chunk_size, ctx.dtype) = numbers[:4], numbers[4:]
    _, entropy, _, row_max, log_sum = output
    ctx.save_for_backward(hidden, weight, bias, labels, temperature, entropy, row_max, log_sum)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_log_prob: Any, grad_entropy: Any, *unused: Any) -> tuple[Any, ...]:
    hidden, weight, bias, labels, temperature, entropy, row_max, log_sum = ctx.saved_tensors
    if not ctx.want_entropy:
        grad_entropy = None
    if grad_log_prob is None:
        grad_log_prob = torch.zeros_like(row_max)
    needs = tuple(ctx.needs_input_grad[:3])
    grads = _backward_op(
        grad_log_prob, grad_entropy, hidden, weight, bias, labels, temperature, *ctx.numbers, entropy, row_max, log_sum,
        *needs, ctx.chunk_size, ctx.dtype,
    )  # fmt: skip
    return *(g if need else None for g, need in zip(grads, needs)), *(None,) * 10


_op.register_autograd(_backward, setup_context=_setup)
refuse_double_backward(_backward_op, "linear_log_prob")


def check_head(op: str, hidden: Any, weight: Any, labels: Any, bias: Any, chunk_size: int | None) -> None:
    """Raise ValueError unless the operands of a head fit together."""
    check_tensor(op, "hidden", hidden, ndim=2)
    check_tensor(op, "weight", weight, ndim=2, device=hidden.device)
    if weight.shape[1] != hidden.shape[1] or weight.shape[0] == 0:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}: [V, {hidden.shape[1]}] with V >= 1 is needed")
    check_labels(op, labels, hidden.shape[:1], hidden.device)
    if bias is not None:
        check_tensor(op, "bias", bias, shape=weight.shape[:1], device=hidden.device)
    if chunk_size is not None:
        check_float(op, "chunk_size", chunk_size, low=1)


def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    want_entropy: bool = False,
    want_sum_sq: bool = False,
    ignore_index: int = -100,
    logit_scale: float | None = None,
    logit_softcap: float | None = None,
    chunk_size: int | None = None,
) -> LogProbs:
    """Log-probs of a head's tokens from its hidden rows, without ever holding the logits [N, V].

        u = logit_scale (hidden weight^T + bias),   u = softcap tanh(u / softcap),   z = u / temperature,
        log_prob = z[label] - logsumexp(z),   entropy = logsumexp(z) - sum_j softmax(z)_j z_j

    The forward costs 2NHV floating-point operations, the backward 6NHV: it makes the logits again, chunk by chunk.
    Where the loss needs its own token's log-prob only, `linear_token_loss` costs 6NHV in all.

    Args:
        hidden: [N, H] float. Its dtype (or the autocast dtype inside an autocast region) is that of the products.
        weight: [V, H] float; another dtype than hidden's is cast, its gradient comes back in its own.
        labels: [N] integer, the sampled tokens.
        bias: [V] float or None.
        temperature: positive number, or [N] float; no gradient flows to it.
        want_entropy: also give the entropy, in nats.
        want_sum_sq: also give the sum of squared probabilities (no gradient).
        ignore_index: rows with this label give 0 and no gradient; their hidden rows may hold anything.
        logit_scale: factor of the logits (Cohere, Granite); None: 1.
        logit_softcap: cap of the logits (Gemma 2); None: none.
        chunk_size: rows of logits in memory at a time; None: chosen for the device.

    Returns:
        LogProbs [N], float32 (float64 for float64 hidden).

    Raises:
        ValueError: a shape, dtype, device or value that is not allowed.
    """
    op = "linear_log_prob"
    check_head(op, hidden, weight, labels, bias, chunk_size)
    per_row, number = check_temperature(op, temperature, labels.shape, hidden.device)
    scale, softcap = check_logit_options(op, logit_scale, logit_softcap)
    value, entropy, sum_sq, _, _ = _op(
        hidden, weight, bias, labels, per_row, number, scale, softcap, ignore_index,
        want_entropy, want_sum_sq, chunk_size or 0, compute_dtype(hidden),
    )  # fmt: skip
    return LogProbs(value, entropy if want_entropy else None, sum_sq.detach() if want_sum_sq else None)
