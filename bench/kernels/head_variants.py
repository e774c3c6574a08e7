"""A language-model head with a clipped policy loss, forward and backward: data, and plain torch. Imports only torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SEQUENCES = 8  # some losses take one advantage per sequence
HIDDEN, VOCABULARY = 576, 49152
# log-ratios away from the borders of the clip, so that no rounding of a log-prob moves a token across one
LOG_RATIOS = (-0.5, -0.1, 0.0, 0.08, 0.4)


class Data(NamedTuple):
    """Inputs. hidden [N, H], weight [V, H], labels, old, advantages [N]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor

    @staticmethod
    def of(inputs: dict[str, torch.Tensor]) -> Data:
        """From tensors by name, the first two as leaves."""
        leaves = {name: inputs[name].detach().requires_grad_() for name in ("hidden", "weight")}
        return Data(**(inputs | leaves))


def make(rows: int, dtype: torch.dtype, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Random rows whose distribution is about as sharp as a small model's."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, hidden, generator=g).to(dtype)
    weight = (0.05 * torch.randn(vocabulary, hidden, generator=g)).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    parts = [torch.log_softmax(h.float() @ weight.float().t(), -1) for h in x.split(128)]
    value = torch.cat(parts).gather(1, labels[:, None])[:, 0]
    log_ratio = torch.tensor(LOG_RATIOS)[torch.randint(0, len(LOG_RATIOS), (rows,), generator=g)]
    advantages = torch.randn(SEQUENCES, generator=g).repeat_interleave(rows // SEQUENCES)
    return {"hidden": x, "weight": weight, "labels": labels, "old": value - log_ratio, "advantages": advantages}


def token_loss(data: Data, value: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
    """max(-A r, -A clip(r, 0.8, 1.2)) / N."""
    part = slice(None) if rows is None else rows
    a, ratio = data.advantages[part], (value - data.old[part]).exp()
    return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) / data.labels.shape[0]


class Step:
    """A call that gives the loss, d hidden and d weight, from cleared gradients. `forget` drops what a call left."""

    def __init__(self, loss_of: Callable[[Data], torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
        self.loss_of, self.data = loss_of, Data.of(inputs)

    def forget(self) -> None:
        self.data.hidden.grad = self.data.weight.grad = None

    def __call__(self) -> Any:
        self.forget()
        loss = self.loss_of(self.data)
        loss.backward()
        return loss.detach(), self.data.hidden.grad, self.data.weight.grad


def naive(d: Data) -> torch.Tensor:
    """All logits in float32."""
    logits = (d.hidden @ d.weight.t()).float()
    value = torch.log_softmax(logits, -1).gather(1, d.labels[:, None])[:, 0]
    return token_loss(d, value).sum()


def torch_chunked(d: Data) -> torch.Tensor:
    """torch's own chunked head, in versions that have it."""
    function = torch.nn.functional.linear_cross_entropy
    options = torch.nn.LinearCrossEntropyOptions()
    value = -function(d.hidden, d.weight, d.labels, reduction="none", options=options)
    return token_loss(d, value.float()).sum()


def has_torch_chunked() -> bool:
    """True where this torch has `linear_cross_entropy` with options."""
    return hasattr(torch.nn.functional, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def reference(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Loss, d hidden and d weight in float64."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    data = Data.of(wide)
    total = data.hidden.new_zeros(())
    for part in (slice(i, i + 256) for i in range(0, data.labels.shape[0], 256)):  # what float64 takes, in pieces
        value = torch.log_softmax(data.hidden[part] @ data.weight.t(), -1)
        loss = token_loss(data, value.gather(1, data.labels[part, None])[:, 0], part).sum()
        loss.backward()
        total = total + loss.detach()
    assert data.hidden.grad is not None and data.weight.grad is not None
    return [total, data.hidden.grad, data.weight.grad]
