"""Policy and value loss, forward and backward, by aggregation mode, with verl's functions and plain torch."""

from __future__ import annotations

import pytest
import torch

from bench.harness.measure import Case, once_in_smoke
from bench.harness.variants import Inputs, Local
from bench.kernels.cost_model import batch_cost
from bench.kernels.plain import eager_aggregate, eager_policy_tokens, eager_value
from fastrl.kernels import clipped_policy_loss, clipped_value_loss

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SIZES = [(64, 1024), (256, 2048)]


def make(rows: int, columns: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x, y, z = (torch.randn(rows, columns) * 0.3 - 1 for _ in range(3))
    lengths = torch.randint(columns // 4, columns + 1, (rows, 1))
    x, y, z = away_from_borders(x.double(), y.double(), z.double() + 1)
    return {"log_prob": x, "old": y, "advantages": z, "mask": torch.arange(columns)[None] < lengths}


def away_from_borders(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
    """The values with those moved where rounding would decide between two branches of a loss: a ratio at the border of
    the clip, a value at its own, and two squares of the same size."""
    for _ in range(8):
        ratio, held = (x - y).exp(), torch.minimum(torch.maximum(x, y - 0.5), y + 0.5)
        near = (ratio - 0.8).abs().minimum((ratio - 1.2).abs()).minimum(((x - y).abs() - 0.5).abs()) < 1e-4
        squares = (x - z) ** 2, (held - z) ** 2
        near |= (held != x) & ((squares[0] - squares[1]).abs() < 1e-4 * squares[0])
        x, z = torch.where(near, x + 0.003, x), torch.where(near, z + 0.007, z)
    return [t.float() for t in (x, y, z)]


def gradient(loss_of, x):
    """A call that gives loss and gradient."""

    def run():
        leaf = x.detach().requires_grad_()
        loss = loss_of(leaf)
        loss.backward()
        return loss, leaf.grad

    return run


def factor(mode: str, columns: int) -> dict[str, float]:
    return {"loss_scale_factor": float(columns)} if mode.endswith("norm") else {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_policy_loss(bench, peers, smoke, size, mode):
    once_in_smoke(smoke, size == SIZES[0])
    rows, columns = (8, 128) if smoke else size
    d = make(rows, columns)
    old, adv, mask = d["old"], d["advantages"], d["mask"]

    def plain(x, *data):
        return eager_aggregate(eager_policy_tokens(x, *data), mask, mode)

    ours = gradient(
        lambda x: clipped_policy_loss(x, old, adv, mask, loss_agg_mode=mode, **factor(mode, columns)).loss,
        d["log_prob"],
    )
    wide = [x.double() for x in (d["log_prob"], old, adv)]
    variants = {
        "fastrl": Local(ours),
        "verl": peers.variant("verl", "verl_functions:policy_loss", Inputs(**d), mode=mode),
        "eager": Local(gradient(lambda x: plain(x, old, adv), d["log_prob"])),
    }
    bench(
        Case(
            f"policy loss {rows}x{columns} {mode}",
            variants,
            expected=lambda: list(gradient(lambda x: plain(x, *wide[1:]), wide[0])()),
            view=lambda t: [t[0].detach(), t[1][mask]],
            cost=batch_cost("clipped_policy_loss+grad", rows * columns),
        )
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_value_loss(bench, peers, smoke, size):
    once_in_smoke(smoke, size == SIZES[0])
    rows, columns = (8, 128) if smoke else size
    d = make(rows, columns)
    old, returns, mask = d["old"], d["advantages"], d["mask"]
    variants = {
        "fastrl": Local(gradient(lambda x: clipped_value_loss(x, old, returns, mask).loss, d["log_prob"])),
        "verl": peers.variant("verl", "verl_functions:value_loss", Inputs(**d)),
        "eager": Local(gradient(lambda x: eager_value(x, old, returns, mask), d["log_prob"])),
    }
    wide = [x.double() for x in (d["log_prob"], old, returns)]
    bench(
        Case(
            f"value loss {rows}x{columns}",
            variants,
            expected=lambda: list(gradient(lambda x: eager_value(x, *wide[1:], mask), wide[0])()),
            view=lambda t: [t[0].detach(), t[1][mask]],
            cost=batch_cost("clipped_value_loss+grad", rows * columns),
        )
    )
