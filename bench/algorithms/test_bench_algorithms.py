"""`pytest bench/algorithms`: each estimator and loss on 4096 responses of 1024 tokens on average, one thread."""

import os

import pytest
import torch
from bench_algorithms import REQUIRED_OPTIONS, make_data

from fastrl.algorithms import get_advantage, get_correction, get_policy_loss, list_advantages, list_policy_losses


@pytest.fixture(scope="module")
def data():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_data(int(os.environ.get("FASTRL_BENCH_SAMPLES", "4096")), 1024)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", list_advantages())
def test_advantage(benchmark, data, name):
    benchmark.pedantic(get_advantage(name).call, (data,), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("name", list_policy_losses())
def test_policy_loss(benchmark, data, name):
    entry, options = get_policy_loss(name), REQUIRED_OPTIONS.get(name, {})

    def forward_and_backward():
        x = data["log_prob"].detach().requires_grad_()
        entry.call(data | {"log_prob": x}, options).loss.sum().backward()

    benchmark.pedantic(forward_and_backward, rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("name", ["token_truncate", "sequence_truncate", "reject_k3_token_truncate"])
def test_correction(benchmark, data, name):
    benchmark.pedantic(get_correction(name).call, (data,), rounds=3, warmup_rounds=1)
