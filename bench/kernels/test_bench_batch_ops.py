"""The other ops of a batch, each against plain torch, and weights packed for delivery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastrl.kernels as K
from bench.harness.measure import Case
from bench.harness.variants import Local
from bench.kernels.cost_model import batch_cost, pack_cost
from bench.kernels.plain import eager_aggregate, eager_kl, eager_mismatch, eager_whiten

ROWS, COLUMNS = 256, 2048

Data = dict[str, torch.Tensor]


def loop_returns(d: Data) -> torch.Tensor:
    """Discounted sums of what follows, token by token; for masks that are prefixes."""
    total, found = torch.zeros_like(d["x"][:, 0]), []
    for t in reversed(range(d["x"].shape[1])):
        total = (d["x"][:, t] + 0.99 * total) * d["mask"][:, t]
        found.append(total)
    return torch.stack(found[::-1], 1)


def variance(d: Data) -> torch.Tensor:
    return d["x"][d["mask"]].var()


# name -> (ours, plain torch, what the floor counts)
OPS: dict[str, tuple[Callable[[Data], Any], Callable[[Data], Any], str]] = {
    "discounted_returns": (
        lambda d: K.discounted_returns(d["x"], d["mask"], gamma=0.99), loop_returns, "discounted_returns"
    ),
    "whiten": (lambda d: K.whiten(d["x"], d["mask"]), lambda d: eager_whiten(d["x"], d["mask"]), "whiten"),
    "masked_stats": (lambda d: K.masked_stats(d["x"], d["mask"]).var, variance, "masked_stats"),
    "kl_divergence": (
        lambda d: K.kl_divergence(d["x"], d["y"]), lambda d: eager_kl(d["x"], d["y"]), "kl_divergence"
    ),
    "aggregate": (
        lambda d: K.aggregate(d["x"], d["mask"], loss_agg_mode="seq-mean-token-mean"),
        lambda d: eager_aggregate(d["x"], d["mask"], "seq-mean-token-mean"),
        "aggregate",
    ),
    "mismatch_stats": (
        lambda d: K.mismatch_stats(d["x"], d["y"], d["mask"]).k3_mean,
        lambda d: eager_mismatch(d["x"], d["y"], d["mask"])[0],
        "mismatch_stats",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(OPS))
def test_op(bench, smoke, name):
    rows, columns = (8, 128) if smoke else (ROWS, COLUMNS)
    torch.manual_seed(0)
    x, y = (torch.randn(rows, columns) * 0.3 - 1 for _ in range(2))
    mask = torch.arange(columns)[None] < torch.randint(columns // 4, columns + 1, (rows, 1))
    d = {"x": x, "y": y, "mask": mask}
    exact = {k: v.double() if v.is_floating_point() else v for k, v in d.items()}
    ours, plain, cost = OPS[name]
    bench(
        Case(
            f"{name} {rows}x{columns}",
            {"fastrl": Local(lambda: ours(d)), "plain torch": Local(lambda: plain(d))},
            expected=lambda: [plain(exact)],
            view=lambda t: [t[0][mask] if t[0].shape == mask.shape else t[0]],
            cost=batch_cost(cost, rows * columns),
        )
    )


def test_pack_weights(bench, smoke):
    torch.manual_seed(0)
    shape = (8, 8) if smoke else (576, 1536)
    tensors = [torch.randn(shape) for _ in range(20)]
    total = sum(t.numel() for t in tensors)
    bucket = torch.empty(total, dtype=torch.bfloat16)

    def ours() -> torch.Tensor:
        K.pack_weights(tensors, bucket, torch.bfloat16)
        return bucket

    def plain() -> torch.Tensor:
        return torch.cat([t.flatten().bfloat16() for t in tensors])

    bench(
        Case(
            f"pack_weights {total / 1e6:.1f}M fp32 -> bf16",
            {"fastrl": Local(ours), "cast and cat": Local(plain)},
            expected=lambda: [plain()],
            tolerance=0.0,
            cost=pack_cost(total),
        )
    )
