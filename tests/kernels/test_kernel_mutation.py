"""The tests' own test: scale one output of an op by 1.01 and the op's test has to fail.

It runs on the reference; the interpreter process runs the same tests on the kernels, with the same tolerances.
"""

from __future__ import annotations

import importlib

import pytest
import test_kernel_gae
import test_kernel_groups
import test_kernel_losses
import test_kernel_mismatch
import torch
from kernel_cases import TRITON

pytestmark = pytest.mark.skipif(TRITON, reason="checked on the reference")


def losses_sum():
    test_kernel_losses.test_policy_sum_every_mode("seq-mean-token-mean", {})


def policy_tokens():
    test_kernel_losses.test_policy_tokens(test_kernel_losses.OPTIONS[0])


def values():
    test_kernel_losses.test_values({"value_clip": 0.5})


def kl():
    test_kernel_losses.test_kl("k3")


def aggregate():
    test_kernel_losses.test_aggregate("seq-mean-token-mean")


def returns():
    test_kernel_gae.test_discounted_returns_equal_the_loop(0.9)


def gae():
    test_kernel_gae.test_ragged_equals_the_loop(0.99, 0.95, 0.7)


def groups():
    test_kernel_groups.test_groups_equal_the_loop("std", "leave_one_out")


def whiten():
    test_kernel_groups.test_whiten_equals_the_loop(777, 0.6)


def stats():
    test_kernel_groups.test_stats_overall_and_per_sequence(0.7)


def mismatch():
    test_kernel_mismatch.test_metrics_equal_the_loop(0.1)


def packing():
    test_kernel_mismatch.test_pack_weights(torch.float32)


# folder, op in it, outputs to scale (None: the only one; "out": the argument it writes), the test that has to notice
MUTATIONS = [
    ("gae", "_op", 0, gae),
    ("gae", "_op", 1, gae),
    ("discounted_returns", "_op", None, returns),
    ("group_normalize", "_op", None, groups),
    ("whiten", "_op", None, whiten),
    *(("masked_stats", "_op", i, stats) for i in (0, 2, 3, 4, 5)),
    *(("clipped_policy_loss", "_op", i, losses_sum) for i in (0, 1)),
    *(("clipped_policy_loss", "_op", i, policy_tokens) for i in (0, 1)),
    ("clipped_policy_loss", "chain", None, policy_tokens),
    *(("clipped_value_loss", "_op", i, values) for i in (0, 1)),
    ("clipped_value_loss", "chain", None, values),
    ("kl_divergence", "_op", None, kl),
    ("kl_divergence", "_backward_op", None, kl),
    ("aggregation", "_op", None, aggregate),
    ("aggregation", "_backward_op", None, aggregate),
    ("aggregation", "_scale_op", None, aggregate),
    *(("mismatch_stats", "_op", i, mismatch) for i in (0, 1)),
    ("pack_weights", "_op", "out", packing),
]


@pytest.mark.parametrize(("folder", "attribute", "output", "test"), MUTATIONS)
def test_one_percent_is_noticed(folder, attribute, output, test, monkeypatch):
    test()
    module = importlib.import_module(f"fastrl.kernels.{folder}")
    op = getattr(module, attribute)

    def scaled(*args):
        result = op(*args)
        if output == "out":
            args[1].mul_(1.01)
            return result
        if output is None:
            return result * 1.01
        return tuple(x * 1.01 if i == output else x for i, x in enumerate(result))

    monkeypatch.setattr(module, attribute, scaled)
    with pytest.raises(AssertionError):
        test()
