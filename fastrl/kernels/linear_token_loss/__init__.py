"""Any token-level loss on a language-model head, its gradient made in the forward."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_label_values, check_tensor
from ..dispatch import use_triton
from ..linear_log_prob import check_head
from ..linear_log_prob.chunks import REFERENCE, RowKernels, make_head
from ..linear_log_prob.gemm import compute_dtype
from ..log_prob import LogProbs
from ..log_prob.arguments import check_logit_options, check_temperature
from ..log_prob.reference import RowOptions
from .reference import TokenLoss, head_loss

_OP = "linear_token_loss"


def row_kernels(*tensors: torch.Tensor) -> RowKernels:
    """The passes over logits for the device of these tensors."""
    if not use_triton(tensors):
        return REFERENCE
    from ..linear_log_prob.kernel import TRITON

    return TRITON


class _TokenLoss(torch.autograd.Function):
    """Keeps the gradients that the forward made, and multiplies them by the upstream gradient, once."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, needs: Any, weight_grad: Any, run: Any) -> Any:
        result = run(needs)
        gradients = result.gradients
        ctx.kept = None
        ctx.checked = weight_grad is not None
        if gradients is not None:
            made = None if weight_grad is not None else gradients.weight
            ctx.kept = [
                None if g is None else g.to(x.dtype)
                for g, x in zip((gradients.hidden, made, gradients.bias), (hidden, weight, bias))
            ]
        rows = result.rows
        others = (rows.log_prob, rows.entropy, rows.sum_sq, *result.stats.values())
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        run.names = list(result.stats)
        return result.loss, *others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Any, *unused: Any) -> Any:
        kept = take_kept(ctx, _OP, last=ctx.checked)
        if upstream is None:
            return (None,) * 6
        if ctx.checked:
            torch._assert_async(
                upstream == 1,
                f"{_OP}: with weight_grad the gradient of the weight was added in the forward, for an upstream "
                "gradient of 1: scale inside token_loss_fn, not behind it",
            )
        kept = tuple(None if g is None else multiply_upstream(g, upstream, ctx.kept is None) for g in kept)
        return *kept, None, None, None


def take_kept(ctx: Any, op: str, last: bool = False) -> Any:
    """The gradients that a forward made. They are let go of (so that autograd can take them over as .grad without a
    copy) unless the graph is retained; `last`: let go of in any case.

    Raises:
        RuntimeError: they are gone already.
    """
    if ctx.kept is None:
        raise RuntimeError(
            f"{op}: its gradient was made in the forward and is used up: call {op} again for another backward"
        )
    kept = ctx.kept
    if last or not _graph_is_retained():
        ctx.kept = None
    return kept


def _graph_is_retained() -> bool:
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return query is not None and bool(query())


def check_token_loss(op: str, token_loss_fn: Any, labels: torch.Tensor) -> TokenLoss:
    """The callback, or weights as [N].

    Raises:
        ValueError: it is neither a function nor a float tensor like labels.
    """
    if isinstance(token_loss_fn, torch.Tensor):
        check_tensor(op, "token_loss_fn", token_loss_fn, shape=labels.shape, device=labels.device)
        return token_loss_fn.detach().reshape(-1)
    if not callable(token_loss_fn):
        raise ValueError(f"{op}: token_loss_fn = {token_loss_fn!r}: a function or a tensor of weights is needed")
    return token_loss_fn


def multiply_upstream(gradient: torch.Tensor, upstream: torch.Tensor, inplace: bool) -> torch.Tensor:
    """gradient times upstream [], without waiting for a GPU."""
    if inplace and use_triton([gradient]) and _is_dense(gradient):
        from ..scale_kernel import scale_in_place

        return scale_in_place(gradient, upstream)
    # reading the number is free on a CPU, and a pass over a weight's gradient is not; on a GPU it would stop the stream
    if inplace and upstream.device.type == "cpu" and upstream.item() == 1:
        return gradient
    factor = upstream.to(gradient.dtype)
    return gradient.mul_(factor) if inplace else gradient * factor


def _is_dense(x: torch.Tensor) -> bool:
    """True when the elements fill one stretch of memory, in whatever order."""
    return x.numel() == sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1


class _Run:
    """One call's work, made ready before autograd sees it; `names` of the statistics come back through it."""

    names: list[str]

    def __init__(self, **call: Any) -> None:
        self.call = call
        self.names = []

    def __call__(self, needs: tuple[bool, bool, bool]) -> Any:
        with torch.no_grad(), torch.autocast(self.call["head"].hidden.device.type, enabled=False):
            return head_loss(needs=needs, **self.call)


def linear_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_loss_fn: TokenLoss,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    want_entropy: bool = False,
    want_sum_sq: bool = False,
    ignore_index: int = -100,
    logit_scale: float | None = None,
    logit_softcap: float | None = None,
    chunk_size: int | None = None,
    weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LogProbs, dict[str, torch.Tensor]]:
    """Sum of a token loss over a head's rows, with its gradient made in the forward, chunk by chunk.

        loss = sum_t token_loss_fn(log_prob, entropy, slice)_t,   log_prob and entropy as in `linear_log_prob`

    Each chunk's loss is differentiated while its logits are in memory: 6NHV floating-point operations for forward and
    backward. The loss of a row may depend on that row's log_prob and entropy only, and on constants.

    Args:
        hidden: [N, H] float. Its dtype (or the autocast dtype inside an autocast region) is that of the products.
        weight: [V, H] float; another dtype than hidden's is cast, its gradient comes back in its own.
        labels: [N] integer, the sampled tokens.
        token_loss_fn: called as (log_prob [C], entropy [C] or None, slice of the N rows); returns the loss [C], masked,
            weighted and scaled already, or (loss [C], {name: statistic [C]}). Any torch code; it runs with autograd on
            log_prob and entropy. What else it uses gets no gradient. A float tensor of weights [N] in its place means
            the loss weights x log_prob, known beforehand: statistics and gradient are then one pass over the logits.
        bias: [V] float or None.
        temperature: positive number, or [N] float; no gradient flows to it.
        want_entropy: give entropy to the callback and in the result.
        want_sum_sq: also give the sum of squared probabilities in the result.
        ignore_index: rows with this label give log_prob 0 and no gradient; their hidden rows may hold anything.
        logit_scale: factor of the logits (Cohere, Granite); None: 1.
        logit_softcap: cap of the logits (Gemma 2); None: none.
        chunk_size: rows of logits in memory at a time; None: chosen for the device.
        weight_grad: [V, H] float32 (float64 for float64): the gradient of the weight is added to it in the forward and
            none goes through autograd, which saves a [V, H] tensor and two passes over it per call. The upstream
            gradient has to be 1 then (checked in the backward).

    Returns:
        (loss [], LogProbs [N] detached, {name: [N]} detached). Under `torch.no_grad` nothing is made for a backward.

    Raises:
        ValueError: a shape, dtype, device or value that is not allowed, also in what the callback returns.
        RuntimeError: in a second backward through the same call.
    """
    check_head(_OP, hidden, weight, labels, bias, chunk_size)
    token_loss = check_token_loss(_OP, token_loss_fn, labels)
    check_label_values(_OP, labels, weight.shape[0], ignore_index)
    per_row, number = check_temperature(_OP, temperature, labels.shape, hidden.device)
    scale, softcap = check_logit_options(_OP, logit_scale, logit_softcap)
    dtype = compute_dtype(hidden)
    enabled = torch.is_grad_enabled()
    if weight_grad is not None:
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        check_tensor(_OP, "weight_grad", weight_grad, dtypes=(wanted,), shape=weight.shape, device=weight.device)
    into = weight_grad if enabled else None
    needs = tuple(enabled and x is not None and x.requires_grad for x in (hidden, weight, bias))
    options = RowOptions(per_row, number, scale, softcap, ignore_index)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = make_head(hidden, weight, bias, labels, options, dtype)
    run = _Run(
        head=head,
        token_loss=token_loss,
        kernels=row_kernels(hidden, weight),
        weight_dtype=weight.dtype,
        want_entropy=want_entropy,
        want_sum_sq=want_sum_sq,
        chunk_size=chunk_size or 0,
        weight_grad=into,
    )
    loss, value, entropy, sum_sq, *stats = _TokenLoss.apply(hidden, weight, bias, needs, into, run)
    rows = LogProbs(value, entropy if want_entropy else None, sum_sq if want_sum_sq else None)
    return loss, rows, dict(zip(run.names, stats))
