"""The optimizer: schedules by hand, clipping by hand, refusal of non-finite gradients."""

import math

import pytest
import torch
from torch import nn

from fastrl.errors import TrainingError
from fastrl.trainer.optim import Optimizer, Schedule, global_grad_norm, parameter_groups, total_updates


def vector(values):
    module = nn.Module()
    module.p = nn.Parameter(torch.tensor(values))
    return module


def sgd(module, lr=0.1, **options):
    inner = torch.optim.SGD(module.parameters(), lr=lr)
    return Optimizer(module, Schedule(lr), name="policy", torch_optimizer=inner, **options)


def test_linear_schedule_reaches_zero_after_the_last_update():
    total = total_updates(num_steps=8, updates_per_step=2, epochs_per_batch=2)
    assert total == 32
    schedule = Schedule(1.0, "linear", 0, total)
    assert [schedule.rate(k) for k in (0, 8, 16, 31, 32, 40)] == [1.0, 0.75, 0.5, 0.03125, 0.0, 0.0]


def test_warmup_uses_k_over_w_for_update_k():
    schedule = Schedule(2.0, "constant", warmup=4, total=10)
    assert [schedule.rate(k) for k in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_ends_at_the_minimum_ratio():
    schedule = Schedule(1.0, "cosine", 0, 10, min_ratio=0.1)
    assert schedule.rate(5) == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule.rate(10) == pytest.approx(0.1)


def test_gradient_is_clipped_to_the_norm_once():
    module = vector([1.0, 2.0])
    optimizer = sgd(module, max_grad_norm=1.0)
    module.p.grad = torch.tensor([3.0, 4.0])
    norm, applied = optimizer.step()
    assert applied and float(norm) == pytest.approx(5.0)
    assert module.p.tolist() == pytest.approx([0.94, 1.92], abs=1e-6)
    assert module.p.grad is None


def test_nonfinite_gradient_leaves_everything_alone():
    module = vector([1.0, 2.0])
    optimizer = Optimizer(module, Schedule(0.1, warmup=5), name="policy")
    module.p.grad = torch.tensor([0.5, 0.5])
    optimizer.step()
    before = [t.clone() for t in (module.p.detach(), *optimizer.torch_optimizer.state[module.p].values())]
    rate = optimizer.lr
    module.p.grad = torch.tensor([math.nan, 1.0])
    norm, applied = optimizer.step()
    after = [module.p.detach(), *optimizer.torch_optimizer.state[module.p].values()]
    assert not applied and math.isnan(float(norm))
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert optimizer.lr == rate and optimizer.skipped_total == 1 and module.p.grad is None


def test_three_in_a_row_stop_the_run_with_the_cause():
    module = vector([1.0])
    optimizer = sgd(module, max_skipped=3)
    for _ in range(2):
        module.p.grad = torch.tensor([math.inf])
        optimizer.step()
    module.p.grad = torch.tensor([1.0])
    optimizer.step()
    assert optimizer.skipped_in_a_row == 0
    for _ in range(2):
        module.p.grad = torch.tensor([math.inf])
        optimizer.step()
    module.p.grad = torch.tensor([math.inf])
    with pytest.raises(TrainingError, match=r"3 updates of the policy in a row .*learning rate"):
        optimizer.step()


def test_nonfinite_loss_skips_even_with_finite_gradients():
    module = vector([1.0])
    optimizer = sgd(module)
    module.p.grad = torch.tensor([1.0])
    _, applied = optimizer.step(loss_is_finite=False)
    assert not applied and module.p.tolist() == [1.0]


def test_norm_runs_over_all_parameters_and_skips_missing_gradients():
    a, b, c = (nn.Parameter(torch.zeros(n)) for n in (1, 1, 2))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert float(global_grad_norm([a, b, c])) == pytest.approx(5.0)


def test_fp32_masters_keep_updates_that_bf16_would_lose():
    module = vector([0.02])
    optimizer = sgd(module, lr=1e-6, max_grad_norm=10.0)
    for _ in range(1000):
        module.p.grad = torch.tensor([1.0])
        optimizer.step()
    assert module.p.item() == pytest.approx(0.019, rel=1e-4)


def test_weight_decay_is_for_matrices_only():
    module = nn.Linear(2, 3)
    groups = parameter_groups(module, 0.1)
    assert [(len(g["params"]), g["params"][0].ndim, g["weight_decay"]) for g in groups] == [(1, 2, 0.1), (1, 1, 0.0)]
