"""Generalised advantage estimation and group-relative scores, with verl's functions and plain torch."""

from __future__ import annotations

import pytest
import torch

from bench.harness.measure import Case, once_in_smoke
from bench.harness.variants import Inputs, Local
from bench.kernels.cost_model import batch_cost, group_cost
from bench.kernels.plain import chunked_gae, eager_gae, eager_groups, eager_whiten
from fastrl.data.batch import cu_seqlens_of
from fastrl.kernels import gae, group_normalize, whiten

GAMMA, LAMBDA = 0.99, 0.95
SIZES = [(64, 1024), (256, 2048), (512, 4096)]
GROUPS = [(1024, 8), (4096, 16), (16384, 16)]


def prefix_mask(rows: int, columns: int) -> torch.Tensor:
    """Responses of a quarter to the full length."""
    lengths = torch.randint(columns // 4, columns + 1, (rows, 1))
    return torch.arange(columns)[None] < lengths


def holes(mask: torch.Tensor) -> torch.Tensor:
    """Turns of tool output of 64 tokens in between."""
    return mask & (torch.arange(mask.shape[1]) // 64 % 4 != 2)[None]


def whitened(function, rewards, values, mask):
    """Whitened advantages, and returns, by a plain function."""
    advantages, returns = function(rewards, values, mask, GAMMA, LAMBDA)
    return eager_whiten(advantages, mask), returns


def gae_case(rows: int, columns: int, kind: str, peers) -> Case:
    torch.manual_seed(0)
    rewards, values, prefix = torch.randn(rows, columns), torch.randn(rows, columns), prefix_mask(rows, columns)
    mask = holes(prefix) if kind == "holes" else prefix
    ragged = {"rewards": rewards[prefix], "values": values[prefix], "mask": mask[prefix]}
    borders = cu_seqlens_of(prefix.sum(1))

    def ours():
        advantages, returns = gae(rewards, values, mask, gamma=GAMMA, gae_lambda=LAMBDA)
        return whiten(advantages, mask), returns

    def ours_ragged():
        m = ragged["mask"] if kind == "holes" else None
        advantages, returns = gae(
            ragged["rewards"], ragged["values"], m, gamma=GAMMA, gae_lambda=LAMBDA, cu_seqlens=borders
        )
        return whiten(advantages, m), returns

    inputs = Inputs(rewards=rewards, values=values, mask=mask)
    variants = {
        "fastrl": Local(ours),
        "fastrl ragged": Local(ours_ragged),
        "verl": peers.variant("verl", "verl_functions:gae", inputs, gamma=GAMMA, lam=LAMBDA),
        "python loop": Local(lambda: whitened(eager_gae, rewards, values, mask)),
    }
    if kind == "prefix":
        variants["chunked scan"] = Local(lambda: whitened(chunked_gae, rewards, values, mask))
    return Case(
        f"gae {rows}x{columns} {kind}",
        variants,
        expected=lambda: list(whitened(eager_gae, rewards.double(), values.double(), mask)),
        view=lambda tensors: [x[mask] if x.dim() == 2 else x[ragged["mask"]] for x in tensors],
        cost=batch_cost("gae", rows * columns),
    )


@pytest.mark.parametrize("kind", ["prefix", "holes"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_gae(bench, peers, smoke, size, kind):
    once_in_smoke(smoke, size == SIZES[0])
    bench(gae_case(*((8, 128) if smoke else size), kind, peers))


@pytest.mark.parametrize("size", GROUPS, ids=lambda s: f"{s[0]}-{s[1]}")
def test_groups(bench, peers, smoke, size):
    once_in_smoke(smoke, size == GROUPS[0])
    samples, group = (64, 8) if smoke else size
    torch.manual_seed(0)
    ids, scores = torch.arange(samples) // group, torch.rand(samples)
    inputs = Inputs(ids=ids, scores=scores)
    vectorised = "compute_grpo_vectorized_outcome_advantage"
    variants = {
        "fastrl": Local(lambda: group_normalize(scores, ids)),
        "verl": peers.variant("verl", "verl_functions:groups", inputs),
        "verl vectorized": peers.variant("verl", "verl_functions:groups", inputs, function=vectorised),
        "scatter": Local(lambda: eager_groups(scores, ids)),
    }
    bench(
        Case(
            f"groups {samples}/{group}",
            variants,
            expected=lambda: [eager_groups(scores.double(), ids)],
            cost=group_cost(samples),
        )
    )
