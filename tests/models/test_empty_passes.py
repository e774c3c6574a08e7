"""A micro-batch of no rows goes through every family: no loss, and gradients of exactly 0."""

import pytest
import torch
from tiny_models import BUILDERS, ragged_batch, tiny_model

from fastrl.data.packing import empty_micro_batch, fill_up, pack
from fastrl.kernels import linear_log_prob, linear_token_loss
from fastrl.models.forward import hidden_rows, trunk_rows
from fastrl.models.head import head_of
from fastrl.models.load import prepare_model


def head(model):
    found = head_of(model)
    return {"weight": found.weight, "bias": found.bias, "logit_softcap": found.logit_softcap}


@pytest.mark.parametrize("attention", ["tiled", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", list(BUILDERS))
def test_no_rows(family, checkpointing, attention):
    model = prepare_model(tiny_model(family), attention=attention, gradient_checkpointing=checkpointing)
    with_rows = pack(ragged_batch([3], [[2, 4]]), max_tokens=100)[0]
    hidden_rows(model, with_rows).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    micro = empty_micro_batch("cpu")
    for in_forward in (True, False):
        model.zero_grad()
        hidden = hidden_rows(model, micro)
        assert hidden.shape == (0, 32)
        if in_forward:
            loss, rows, _ = linear_token_loss(
                hidden,
                labels=micro.labels,
                token_loss_fn=lambda log_prob, entropy, _: (2 * log_prob, {"x": entropy}),
                want_entropy=True,
                **head(model),
            )
        else:
            rows = linear_log_prob(hidden, labels=micro.labels, want_entropy=True, **head(model))
            loss = (rows.log_prob + rows.entropy).sum()
        assert rows.log_prob.shape == rows.entropy.shape == (0,)
        loss.backward()
        assert float(loss) == 0
        for name, parameter in model.named_parameters():
            if name in trained:
                assert parameter.grad is not None, name
                assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_a_stand_in_row_changes_no_other_pass():
    """The rows of a pass are the same before and after one without rows."""
    model = prepare_model(tiny_model("llama"))
    micro = pack(ragged_batch([3, 2], [[2, 4], [3]]), max_tokens=100)[0]
    before = trunk_rows(model, micro)
    assert trunk_rows(model, empty_micro_batch("cpu")).shape == (0, 32)
    assert torch.equal(trunk_rows(model, micro), before)


def test_as_many_passes_as_asked_for():
    micro_batches = pack(ragged_batch([3, 2], [[2, 4], [3]]), max_tokens=5)
    filled = fill_up(micro_batches, 6, "cpu")
    assert len(filled) == 6 and filled[: len(micro_batches)] == micro_batches
    assert all(m.num_rows == m.num_tokens == m.num_keys == 0 and m.segments == () for m in filled[len(micro_batches) :])
