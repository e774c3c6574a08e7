"""Recomputed layers give the same gradient to the bit, whichever they are and whatever of them is kept."""

import pytest
import torch
from tiny_models import ragged_batch, tiny_model

from fastrl.data.packing import pack
from fastrl.models.forward import hidden_rows, inside_head
from fastrl.models.head import logits_of
from fastrl.models.load import prepare_model
from fastrl.models.recompute import PRODUCTS


def gradient(dtype, **options):
    """Flat gradient, and how many trunk products the backward pass and its recomputation ran."""
    model = prepare_model(tiny_model("llama", dtype=dtype), **options)
    micro = pack(ragged_batch([4, 6], [[3, 5], [2, 4]]), max_tokens=1000)[0]
    counter = Counter()
    loss = inside_head(model, logits_of, hidden_rows(model, micro)).square().mean()
    with counter:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), counter.calls


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in PRODUCTS
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_the_same_and_the_work_is_what_was_asked_for(dtype):
    plain, none = gradient(dtype)
    calls = {}
    for name, options in {
        "all": {},
        "half": {"gradient_checkpointing_every": 2},
        "products": {"gradient_checkpointing_keep": "products"},
    }.items():
        other, calls[name] = gradient(dtype, gradient_checkpointing=True, **options)
        assert torch.equal(plain, other), name
    assert none == calls["products"] < calls["half"] < calls["all"]
    assert (calls["half"] - none) * 3 == (calls["all"] - none) * 2  # two of three layers
