"""Log-prob of the sampled token and entropy of its distribution, from logits in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..checks import check_tensor
from ..dispatch import accumulate_dtype, define_op, refuse_double_backward
from .arguments import check_labels, check_temperature
from .reference import log_prob_backward_reference, log_prob_reference


class _Pair(NamedTuple):
    log_prob: torch.Tensor
    entropy: torch.Tensor | None


class LogProbs(_Pair):
    """The pair (log_prob, entropy) with the attribute `sum_sq`; each shaped like labels, None where not asked for."""

    sum_sq: torch.Tensor | None = None

    @property
    def log_prob(self) -> torch.Tensor:
        return self[0]  # torch.compile of 2.12 cannot read a named field of a subclass, but this it can

    @property
    def entropy(self) -> torch.Tensor | None:
        return self[1]

    def __new__(
        cls, log_prob: torch.Tensor, entropy: torch.Tensor | None = None, sum_sq: torch.Tensor | None = None
    ) -> LogProbs:
        self = super().__new__(cls, log_prob, entropy)
        if sum_sq is not None:
            self.sum_sq = sum_sq
        return self

    def __repr__(self) -> str:
        return f"LogProbs(log_prob={self.log_prob}, entropy={self.entropy}, sum_sq={self.sum_sq})"


def _fake(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    want_entropy: bool,
    want_sum_sq: bool,
    ignore_index: int,
) -> tuple[torch.Tensor, ...]:
    def like(wanted: bool) -> torch.Tensor:
        return logits.new_empty(labels.shape if wanted else (0,), dtype=accumulate_dtype(logits))

    return like(True), like(want_entropy), like(want_sum_sq), like(True), like(True)


def _fake_backward(grad_log_prob: torch.Tensor, grad_entropy: Any, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_op = define_op(
    "log_prob",
    "(Tensor logits, Tensor labels, Tensor? temperature, float temperature_value, bool want_entropy, "
    "bool want_sum_sq, int ignore_index) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=log_prob_reference,
    kernel="fastrl.kernels.log_prob.kernel:log_prob_triton",
    fake=_fake,
)
_backward_op = define_op(
    "log_prob_backward",
    "(Tensor grad_log_prob, Tensor? grad_entropy, Tensor logits, Tensor labels, Tensor? temperature, "
    "float temperature_value, Tensor entropy, Tensor row_max, Tensor log_sum, int ignore_index) -> Tensor",
    reference=log_prob_backward_reference,
    kernel="fastrl.kernels.log_prob.kernel:log_prob_backward_triton",
    fake=_fake_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, labels, temperature, ctx.temperature_value, ctx.want_entropy, _, ctx.ignore_index = inputs
    _, entropy, _, row_max, log_sum = output
    ctx.save_for_backward(logits, labels, temperature, entropy, row_max, log_sum)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_log_prob: Any, grad_entropy: Any, *unused: Any) -> tuple[Any, ...]:
    logits, labels, temperature, entropy, row_max, log_sum = ctx.saved_tensors
    if not ctx.want_entropy:
        grad_entropy = None
    if grad_log_prob is None:
        grad_log_prob = torch.zeros_like(row_max)
    grad = _backward_op(
        grad_log_prob, grad_entropy, logits, labels, temperature, ctx.temperature_value, entropy, row_max, log_sum,
        ctx.ignore_index,
    )  # fmt: skip
    return grad, None, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_setup)
refuse_double_backward(_backward_op, "log_prob")


def log_prob(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    want_entropy: bool = False,
    want_sum_sq: bool = False,
    ignore_index: int = -100,
) -> LogProbs:
    """Log-prob of each row's label and entropy of its distribution, in one read of the logits.

        z = logits / temperature,   log_prob = z[label] - logsumexp(z),
        entropy = logsumexp(z) - sum_j softmax(z)_j z_j,   sum_sq = sum_j softmax(z)_j^2

    Gradients flow to logits from log_prob and from entropy (not from sum_sq). -inf logits are legal: 0 log 0 = 0.

    Args:
        logits: [..., V] float, any strides.
        labels: [...] integer, the sampled token of each row.
        temperature: positive number, or [...] float, one per row; no gradient flows to it.
        want_entropy: also give the entropy, in nats.
        want_sum_sq: also give the sum of squared probabilities.
        ignore_index: rows with this label are not read: log_prob, entropy, sum_sq and gradient are 0.

    Returns:
        LogProbs(log_prob, entropy, sum_sq) shaped like labels, float32 (float64 for float64 logits).

    Raises:
        ValueError: a shape, dtype, device or value that is not allowed.
    """
    check_tensor("log_prob", "logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"log_prob: logits has shape {list(logits.shape)}: [..., V] with V >= 1 is needed")
    check_labels("log_prob", labels, logits.shape[:-1], logits.device)
    per_row, number = check_temperature("log_prob", temperature, labels.shape, logits.device)
    value, entropy, sum_sq, _, _ = _op(logits, labels, per_row, number, want_entropy, want_sum_sq, ignore_index)
    return LogProbs(value, entropy if want_entropy else None, sum_sq.detach() if want_sum_sq else None)
