"""The probe after an update: silent when the engine computes with the trainer's weights, a stop when it does not."""

import copy

import pytest
import torch

from fastrl.data.prompts import Prompt
from fastrl.dist.weight_verify import VerifySchedule
from fastrl.errors import WeightError
from fastrl.models.load import load_model, load_tokenizer, stop_token_ids
from fastrl.rollout.native import NativeEngine
from fastrl.trainer.actor import PolicyModel
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.probe import DeliveryProbe


@pytest.fixture(scope="module")
def pair():
    """The trainer's model, and an engine with a copy of its own."""
    model = load_model("builtin:tiny")
    theirs = copy.deepcopy(model)
    tokenizer = load_tokenizer("builtin:tiny")
    engine = NativeEngine(theirs, tokenizer=tokenizer, stop_token_ids=sorted(stop_token_ids(model, tokenizer)))
    prompt = Prompt(0, tuple(tokenizer("12+34=")["input_ids"]), "12+34=", None, "arithmetic", "46")
    yield model, theirs, engine, prompt
    engine.close()


def probe_of(pair, when):
    model, _, engine, prompt = pair
    # another temperature than 1 in training must not matter: greedy log-probs are those of the plain softmax
    return DeliveryProbe(engine, PolicyModel(model, temperature=0.5, dtype=torch.float32), prompt, VerifySchedule(when))


def test_equal_weights_pass_and_are_counted(pair):
    _, theirs, engine, _ = pair
    metrics = Metrics()
    engine.update_weights(theirs, 4)
    probe_of(pair, "always").after_update(4, metrics)
    values = metrics.reduce()
    assert 0 <= values["mismatch/probe"] < 1e-4
    assert values["time/sync_weights/probe_s"] > 0


def test_a_stale_tensor_and_a_stale_version_stop_the_run(pair):
    model, theirs, engine, _ = pair
    engine.update_weights(theirs, 5)
    with pytest.raises(WeightError, match="version 5 after the update to 6"):
        probe_of(pair, "always").after_update(6, Metrics())
    norm = [p for n, p in model.named_parameters() if n.endswith("norm.weight")][-1]
    with torch.no_grad():
        norm.mul_(1.1)
    try:
        with pytest.raises(WeightError, match=r"update to version 5 the engine's log-probs .* does not compute with"):
            probe_of(pair, "first").after_update(5, Metrics())
        probe_of(pair, "off").after_update(5, Metrics())
    finally:
        with torch.no_grad():
            norm.copy_(
                dict(theirs.named_parameters())[
                    [n for n, _ in model.named_parameters() if n.endswith("norm.weight")][-1]
                ]
            )


def test_schedules():
    def due(when, restart_at=None):
        schedule = VerifySchedule(when)
        out = []
        for i in range(7):
            if i == restart_at:
                schedule.restart()
            out.append(int(schedule.due()))
        return out

    assert due("always") == [1] * 7
    assert due("off") == [0] * 7
    assert due("first", restart_at=3) == [1, 0, 0, 1, 0, 0, 0]
    assert due("every 3") == [1, 0, 0, 1, 0, 0, 1]
    for wrong in ("every", "every 0", "sometimes", ""):
        with pytest.raises(WeightError, match=r"rollout\.verify_weights = .*use always, first, every K or off"):
            VerifySchedule(wrong)
