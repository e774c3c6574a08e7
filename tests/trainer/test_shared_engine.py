"""Weights in common with an engine process, through the engine's own protocol, with a backend worked out by hand."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_external_engine import GREEN, HERE, REQUESTS, collect, expected, policy

from fastrl.config.load import load_config
from fastrl.dist.zero_copy import SharedWeights
from fastrl.errors import EngineError
from fastrl.rollout.backend import BackendSettings
from fastrl.rollout.external import ExternalEngine
from fastrl.rollout.link import DeliveryRefused
from fastrl.rollout.process_link import ProcessLink
from fastrl.trainer.engine_links import BucketSender
from fastrl.trainer.shared_engine import SharedSender, Sharing, share_weights


def start(model, verify="always", name="tiny", **options):
    """An engine with the scripted backend on the model's own memory, and what it falls back to."""
    sharing = Sharing(SharedWeights(model, dtype=torch.float32, timeout_s=20))
    settings = BackendSettings(model=name, options=options)
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])

    def link(sender, settings):
        return ProcessLink("scripted_backend", settings, sender, timeout_s=20, environment={"PYTHONPATH": path})

    def delivered(refusal):
        sharing.give_up(str(refusal))
        return link(BucketSender(model, torch.float32, 20.0), settings)

    own = link(SharedSender(sharing.weights, 20.0, verify), replace(settings, shared_weights=True))
    engine = ExternalEngine(own, model, vocabulary_size=50, context=64, stop_token_ids=[49], instead=delivered)
    return engine, sharing


def fill(model, value):
    """As an optimizer does: in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_updates_reach_the_engine_without_a_byte_and_survive_its_death():
    """Checksums are compared at the first update to each process."""
    model = policy()
    engine, sharing = start(model, verify="first")
    sent = []
    publish = sharing.weights.publish
    sharing.weights.publish = lambda *args, **kw: sent.append(publish(*args, **kw)) or sent[-1]
    try:
        assert collect(engine.generate(REQUESTS, GREEN)) == expected(9, 0)
        fill(model, 2.0)
        engine.update_weights(model, 1)
        assert collect(engine.generate(REQUESTS, GREEN)) == expected(18, 1)
        os.kill(engine.link.process.pid, signal.SIGKILL)
        fill(model, 3.0)
        engine.update_weights(model, 2)
        assert engine.restarts == 1
        assert collect(engine.generate(REQUESTS, GREEN)) == expected(27, 2)
        assert [d.bytes for d in sent] == [0, 0, 0]
        assert [sorted(d.checksums) for d in sent] == [["bias", "weight"], [], ["bias", "weight"]]
        assert sharing.lines() == []
    finally:
        folder = Path(sharing.weights.address).parent
        engine.close()
    assert not folder.exists()


def test_an_engine_that_refuses_is_given_buckets():
    model = policy()
    engine, sharing = start(model, refuse_shared=True)
    levels = []
    sharing.when_given_up = lambda: levels.append(2)
    try:
        assert engine.ready().name == "scripted 1"
        assert sharing.weights is None and levels == [2]
        assert sharing.lines() == [
            "              rollout.zero_copy is not followed: the scripted backend has no use for them"
        ]
        fill(model, 2.0)
        engine.update_weights(model, 1)
        assert collect(engine.generate(REQUESTS, GREEN)) == expected(18, 1)
    finally:
        engine.close()


def test_a_refusal_that_buckets_do_not_cure_is_raised():
    class Refusing:
        def __init__(self, text):
            self.text, self.calls = text, []

        def start(self): ...

        def close(self):
            self.calls.append("close")

        def wait_ready(self):
            raise EngineError(self.text)

    first, second = Refusing("no sharing"), Refusing("no such model")
    engine = ExternalEngine(first, policy(), vocabulary_size=50, instead=lambda refusal: second)
    with pytest.raises(EngineError, match="no such model"):
        engine.ready()
    assert first.calls == ["close"]


def test_a_parameter_that_has_left_and_bytes_that_differ_are_named_at_once():
    model = policy()
    engine, sharing = start(model)
    engine.update_weights(model, 1)
    shared, sums = sharing.weights, sharing.weights.checksums
    shared.checksums = lambda: {name: value + (name == "bias") for name, value in sums().items()}
    with pytest.raises(DeliveryRefused, match="bias"):
        engine.update_weights(model, 2)
    shared.checksums = sums
    engine.update_weights(model, 3)
    model.weight.data = model.weight.data.clone()
    started = time.monotonic()
    with pytest.raises(EngineError, match="weight has left the memory shared with the engine"):
        engine.update_weights(model, 4)
    assert time.monotonic() - started < 5
    assert engine.health().alive
    engine.close()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], ""),
        (["rollout.zero_copy=true", "rollout.engine=native"], "the trainer's own module"),
        (["rollout.zero_copy=true", "rollout.engine=vllm", "rollout.devices=[1]"], r"rollout.devices = \[1\]"),
        (["rollout.zero_copy=true", "rollout.engine=vllm", "parallel.offload=parameters"], "parallel.offload"),
    ],
)
def test_why_weights_are_not_in_common(overrides, text):
    config = load_config([], ["model.path=builtin:tiny", *overrides], cross_check=False).config
    sharing = share_weights(config, policy())
    assert sharing.weights is None and sharing.masters is None
    if text:
        (line,) = sharing.lines()
        assert re.search(text, line)
    else:
        assert sharing.lines() == []
