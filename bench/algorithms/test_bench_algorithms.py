"""Each estimator, policy loss and correction on ragged responses of 1024 tokens on average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.algorithms.bench_algorithms import REQUIRED_OPTIONS, make_data
from bench.harness.calls import tensors_of
from bench.harness.measure import Case
from bench.harness.variants import Local
from fastrl.algorithms import get_advantage, get_correction, get_policy_loss, list_advantages, list_policy_losses

CORRECTIONS = ("token_truncate", "sequence_truncate", "reject_k3_token_truncate")
WHAT = [
    *(("advantage", name) for name in list_advantages()),
    *(("loss", name) for name in list_policy_losses()),
    *(("correction", name) for name in CORRECTIONS),
]


@pytest.fixture(scope="module")
def data(smoke):
    """The batch, in float32 and float64."""
    single = make_data(*((64, 16) if smoke else (1024, 1024)))
    return single, doubled(single)


def doubled(data: dict[str, Any]) -> dict[str, Any]:
    """Every float in float64."""
    return {
        key: doubled(value) if isinstance(value, dict) else (value.double() if value.is_floating_point() else value)
        for key, value in data.items()
    }


def run_of(kind: str, name: str, data: dict[str, Any]) -> Callable[[], Any]:
    """The call; losses forward and backward."""
    if kind != "loss":
        entry = get_advantage(name) if kind == "advantage" else get_correction(name)
        return lambda: entry.call(data)
    loss, options = get_policy_loss(name), REQUIRED_OPTIONS.get(name, {})

    def run() -> Any:
        x = data["log_prob"].detach().requires_grad_()
        token_loss = loss.call(data | {"log_prob": x}, options).loss
        token_loss.sum().backward()
        return token_loss, x.grad

    return run


def floats(result: list[torch.Tensor]) -> list[torch.Tensor]:
    """Masks and weights as numbers."""
    return [x.double() if not x.is_floating_point() else x for x in result]


@pytest.mark.parametrize("kind,name", WHAT, ids=[f"{kind}-{name}" for kind, name in WHAT])
def test_algorithm(bench, data, kind, name):
    single, double = data
    expected = run_of(kind, name, double)
    bench(
        Case(
            f"{kind} {name}",
            {"fastrl": Local(run_of(kind, name, single))},
            expected=lambda: tensors_of(expected()),
            view=floats,
            tolerance=1e-3,
            notes={"fastrl": {"tokens": single["log_prob"].numel()}},
            peak=False,
        )
    )
