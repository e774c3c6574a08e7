"""`pytest bench/kernels`: the batch-level ops on this machine, each checked against its plain reference first."""

from __future__ import annotations

import pytest
import torch

import fastrl.kernels as K

ROWS, COLUMNS, SAMPLES = 256, 2048, 16384


@pytest.fixture(scope="module")
def data():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = torch.randint(COLUMNS // 4, COLUMNS + 1, (ROWS, 1))
    mask = torch.arange(COLUMNS)[None] < lengths
    x, y, z = (torch.randn(ROWS, COLUMNS) * 0.3 - 1 for _ in range(3))
    yield {"x": x, "y": y, "z": z, "mask": mask, "holes": mask & (torch.arange(COLUMNS) // 64 % 4 != 2)}
    torch.set_num_threads(threads)


def with_backward(call, x):
    y = x.clone().requires_grad_()
    call(y).backward()
    return y.grad


def weights():
    return [torch.randn(576, 1536) for _ in range(20)]


CASES = {
    "gae": lambda d: K.gae(d["x"], d["y"], d["mask"], gamma=0.99, gae_lambda=0.95)[0],
    "gae with holes": lambda d: K.gae(d["x"], d["y"], d["holes"], gamma=0.99, gae_lambda=0.95)[0],
    "discounted_returns": lambda d: K.discounted_returns(d["x"], d["mask"], gamma=0.99),
    "group_normalize": lambda d: K.group_normalize(d["x"].flatten()[:SAMPLES], torch.arange(SAMPLES) // 8),
    "whiten": lambda d: K.whiten(d["x"], d["mask"]),
    "masked_stats": lambda d: K.masked_stats(d["x"], d["mask"]).var,
    "clipped_policy_loss": lambda d: with_backward(
        lambda v: K.clipped_policy_loss(v, d["y"], d["z"], d["mask"]).loss, d["x"]
    ),
    "clipped_value_loss": lambda d: with_backward(
        lambda v: K.clipped_value_loss(v, d["y"], d["z"], d["mask"]).loss, d["x"]
    ),
    "kl_divergence": lambda d: with_backward(lambda v: K.kl_divergence(v, d["y"]).sum(), d["x"]),
    "aggregate": lambda d: with_backward(
        lambda v: K.aggregate(v, d["mask"], loss_agg_mode="seq-mean-token-mean"), d["x"]
    ),
    "mismatch_stats": lambda d: K.mismatch_stats(d["x"], d["y"], d["mask"]).k3_mean,
    "pack_weights": lambda d: K.pack_weights(
        WEIGHTS, torch.empty(20 * 576 * 1536, dtype=torch.bfloat16), torch.bfloat16
    )[0],
}
WEIGHTS = weights()


@pytest.mark.parametrize("name", list(CASES))
def test_op(benchmark, data, name, monkeypatch):
    run = CASES[name]
    got = run(data)
    monkeypatch.setenv("FASTRL_KERNELS", "reference")
    torch.testing.assert_close(got, run(data), rtol=1e-4, atol=1e-4)
    monkeypatch.delenv("FASTRL_KERNELS")
    benchmark.pedantic(run, (data,), rounds=5, warmup_rounds=1)
