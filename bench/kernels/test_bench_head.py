"""The language-model head: log-probs from logits, and head with policy loss forward and backward, with the peers'."""

from __future__ import annotations

import pytest
import torch

from bench.harness.measure import Case, once_in_smoke
from bench.harness.variants import Inputs, Local
from bench.kernels.cost_model import head_cost, logits_cost
from bench.kernels.head_variants import (
    HIDDEN,
    VOCABULARY,
    Data,
    Step,
    has_torch_chunked,
    make,
    naive,
    reference,
    token_loss,
    torch_chunked,
)
from fastrl.kernels import linear_log_prob, linear_token_loss, log_prob, scratch

# bfloat16: logits of size 5 carry an error of 0.02, and so do log-probs and the ratios in the loss
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


class Ours(Step):
    """Also gives back the chunk that is kept between calls."""

    def forget(self) -> None:
        super().forget()
        scratch._kept.buffer = None


def in_forward(d: Data, weight_grad: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient made in the forward."""
    return linear_token_loss(
        d.hidden, d.weight, d.labels, lambda lp, entropy, rows: token_loss(d, lp, rows), weight_grad=weight_grad
    )[0]


def recomputed(d: Data) -> torch.Tensor:
    """The head run again in the backward."""
    return token_loss(d, linear_log_prob(d.hidden, d.weight, d.labels).log_prob).sum()


class IntoBuffer(Ours):
    """The second and later micro-batches of a step: the weight has a gradient already, which is added to.

    Only the first call gives the gradient of one step.
    """

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        self.buffer = torch.zeros(inputs["weight"].shape)
        super().__init__(lambda d: in_forward(d, self.buffer), inputs)

    def __call__(self):
        loss, hidden_grad, _ = super().__call__()
        return loss, hidden_grad, self.buffer


def variants_of(inputs, peers, everything: bool) -> dict:
    remote = Inputs(**inputs)
    found = {
        "fastrl": Local(Ours(in_forward, inputs)),
        "naive": Local(Step(naive, inputs)),
        "trl": peers.variant("trl", "trl_functions:head", remote),
        "liger": peers.variant("liger", "liger_functions:head", remote),
        "verl fused": peers.variant("verl", "verl_functions:head_fused", remote),
    }
    if everything:
        found |= {
            "fastrl, weight_grad": Local(IntoBuffer(inputs)),
            "fastrl, recomputed": Local(Ours(recomputed, inputs)),
            "verl logits": peers.variant("verl", "verl_functions:head_logits", remote),
        }
        if has_torch_chunked():
            found["torch linear_cross_entropy"] = Local(Step(torch_chunked, inputs))
    return found


@pytest.mark.parametrize("rows", [256, 512, 1024, 2048])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head(bench, peers, smoke, full, rows, dtype):
    once_in_smoke(smoke, rows == 256)
    if rows > 512 and not full:
        pytest.skip("larger sizes: --full")
    hidden, vocabulary = (64, 512) if smoke else (HIDDEN, VOCABULARY)
    rows = 64 if smoke else rows
    inputs = make(rows, getattr(torch, dtype), hidden, vocabulary)
    bench(
        Case(
            f"head {dtype} N {rows}",
            variants_of(inputs, peers, everything=rows <= 256),
            expected=lambda: reference(inputs),
            tolerance=TOLERANCE[dtype],
            cost=head_cost(rows, hidden, vocabulary, 3, getattr(torch, dtype).itemsize),
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("entropy", [False, True], ids=["log_prob", "log_prob+entropy"])
def test_log_prob(bench, peers, smoke, entropy):
    rows, vocabulary = (16, 512) if smoke else (512, VOCABULARY)
    torch.manual_seed(0)
    logits, labels = torch.randn(rows, vocabulary), torch.randint(0, vocabulary, (rows,))

    def ours():
        found = log_prob(logits, labels, want_entropy=entropy)
        return (found.log_prob, found.entropy) if entropy else found.log_prob

    def expected():
        table = torch.log_softmax(logits.double(), -1)
        value = table.gather(1, labels[:, None])[:, 0]
        return [value, -(table.exp() * table).sum(-1)] if entropy else [value]

    remote = Inputs(logits=logits[None], labels=labels[None])
    bench(
        Case(
            f"log_prob{'+entropy' if entropy else ''} {rows}x{vocabulary}",
            {"fastrl": Local(ours), "trl": peers.variant("trl", "trl_functions:log_prob", remote, entropy=entropy)},
            expected=expected,
            view=lambda tensors: [x.flatten() for x in tensors],
            cost=logits_cost(rows, vocabulary, 1, 4),
        )
    )
