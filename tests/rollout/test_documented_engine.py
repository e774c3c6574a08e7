"""The engine of docs/rollout.md works, and draws what the embedded engine draws."""

import re
from pathlib import Path

import pytest
import torch
from test_native import build, collect, requests, same
from tiny_models import VOCABULARY

from fastrl.data.batch import FinishReason
from fastrl.errors import EngineError
from fastrl.models.double import keep_double
from fastrl.rollout.engine import Engine, GenerationRequest, SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rollout.md"


@torch.no_grad()
def logits_of(model, ids):
    with keep_double(model):
        return model(torch.tensor([ids])).logits[0, -1]


@pytest.fixture
def documented():
    """(the engine class of the page, a plain model, an embedded engine on its twin)."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    plain, embedded = build("llama", stop_token_ids=[17, 23])
    return names["LogitsEngine"](plain, logits_of, [17, 23], VOCABULARY), embedded


def test_two_engines_one_protocol_the_same_samples(documented):
    simple, embedded = documented
    assert isinstance(simple, Engine) and isinstance(embedded, Engine)
    params = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.95, seed=5)
    asked = [*requests(2), GenerationRequest(9, [4, 5], temperature=0.0), GenerationRequest(10, [4], max_tokens=3)]
    for version in (0, 4):
        if version:
            simple.update_weights(simple.model, version)
            embedded.update_weights(embedded.model, version)
        a, b = collect(simple, asked, params), collect(embedded, asked, params)
        same(a, b, atol=1e-6)
        assert {s.policy_version for s in (*a.values(), *b.values())} == {version}


def test_the_rest_of_the_protocol(documented):
    for engine in documented:
        with pytest.raises(EngineError, match="empty prompt"):
            engine.generate([GenerationRequest(0, [])], SamplingParams())
        stream = engine.generate(requests(3), SamplingParams(max_tokens=20))
        engine.sleep(1)
        engine.wake(("weights",))
        engine.wake(("kv",))
        first = next(stream)
        engine.abort()
        rest = list(stream)
        assert len(rest) + 1 == 15 and first.finish_reason != FinishReason.abort
        assert any(s.finish_reason == FinishReason.abort for s in rest)
        engine.reset_prefix_cache()
        assert engine.health().alive
        engine.close()
        engine.close()
        assert not engine.health().alive
        with pytest.raises(EngineError, match="closed"):
            engine.generate(requests(), SamplingParams(max_tokens=2))
