"""The head tests' own test: scale one output of a pass over the logits by 1.01 and the op's test has to fail."""

from __future__ import annotations

import importlib

import pytest
import test_linear_head
import test_log_prob
import test_logits_token_loss
import torch
from kernel_cases import TRITON

from fastrl.kernels.linear_log_prob import chunks

pytestmark = pytest.mark.skipif(TRITON, reason="checked on the reference")

TESTS = {
    "log_prob": lambda: test_log_prob.test_values_and_gradients(torch.float32, (5, 131), False),
    "linear": lambda: test_linear_head.test_both_functions(torch.float32, {}, True, True, 4),
    "linear weights": lambda: test_linear_head.test_weights_in_place_of_a_function(False),
    "logits": lambda: test_logits_token_loss.test_values_and_gradients(torch.float32, (6, 41), True, None),
    "logits weights": lambda: test_logits_token_loss.test_weights_in_place_of_a_function(torch.float32, True),
}


@pytest.mark.parametrize("output", [0, 1, 2, "backward"])
def test_log_prob_notices(output, monkeypatch):
    TESTS["log_prob"]()
    module = importlib.import_module("fastrl.kernels.log_prob")
    name = "_backward_op" if output == "backward" else "_op"
    op = getattr(module, name)

    def scaled(*args):
        result = op(*args)
        if output == "backward":
            return result * 1.01
        return tuple(x * 1.01 if i == output else x for i, x in enumerate(result))

    monkeypatch.setattr(module, name, scaled)
    with pytest.raises(AssertionError):
        TESTS["log_prob"]()


# the pass over the logits, which of the tensors that it writes is scaled, the test that has to notice
PASSES = [
    ("statistics", lambda args: args[3].log_prob, "linear"),
    ("statistics", lambda args: args[3].entropy, "linear"),
    ("statistics", lambda args: args[3].sum_sq, "linear"),
    ("statistics", lambda args: args[3].log_sum, "linear"),
    ("gradient", lambda args: args[6], "linear"),
    ("weighted", lambda args: args[0], "linear weights"),
    ("weighted", lambda args: args[4], "linear weights"),
    ("statistics", lambda args: args[3].log_prob, "logits"),
    ("statistics", lambda args: args[3].entropy, "logits"),
    ("gradient", lambda args: args[6], "logits"),
    ("weighted", lambda args: args[0], "logits weights"),
    ("weighted", lambda args: args[4], "logits weights"),
]


@pytest.mark.parametrize(("which", "written", "test"), PASSES)
def test_the_head_notices(which, written, test, monkeypatch):
    TESTS[test]()
    real = getattr(chunks.REFERENCE, which)

    def scaled(*args):
        result = real(*args)
        written(args).mul_(1.01)
        return result

    changed = chunks.REFERENCE._replace(**{which: scaled})
    for module in ("linear_token_loss", "logits_token_loss"):
        monkeypatch.setattr(importlib.import_module(f"fastrl.kernels.{module}"), "row_kernels", lambda *t: changed)
    with pytest.raises(AssertionError):
        TESTS[test]()


@pytest.mark.parametrize("product", ["project", "hidden_gradient", "add_weight_gradient", "add_bias_gradient"])
def test_the_products_are_noticed(product, monkeypatch):
    real = getattr(chunks, product)

    def scaled(*args):
        out = {"project": 3, "hidden_gradient": 2, "add_weight_gradient": 0, "add_bias_gradient": 0}[product]
        result = real(*args)
        args[out].mul_(1.01)
        return args[out] if result is not None else None

    monkeypatch.setattr(chunks, product, scaled)
    if product == "project":
        monkeypatch.setattr(importlib.import_module("fastrl.kernels.linear_token_loss.reference"), product, scaled)
    with pytest.raises(AssertionError):
        TESTS["linear"]()
