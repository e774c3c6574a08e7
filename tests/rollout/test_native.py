"""The embedded engine: same tokens as Hugging Face, exact log-probs, samples that depend on nothing but themselves."""

import copy

import numpy as np
import pytest
import torch
from tiny_models import BUILDERS, VOCABULARY, tiny_model

import fastrl.models.attention  # noqa: F401  registers the attention implementation
from fastrl.data.batch import FinishReason
from fastrl.errors import EngineError, ModelError
from fastrl.models.double import keep_double
from fastrl.rollout.engine import Engine, GenerationRequest, SamplingParams
from fastrl.rollout.native import NativeEngine
from fastrl.rollout.prefill import PrefillLayout

PROMPTS = [[5, 9, 4, 4, 30, 8, 7], [5, 9, 4, 11], [7], [5, 9, 4, 4, 30, 8, 7, 12, 3], [40, 41, 42, 43, 44]]


def build(name, dtype=torch.float64, **options):
    """(the model as Hugging Face runs it, an engine on its twin)."""
    plain = tiny_model(name, dtype=dtype)
    plain.set_attn_implementation("eager")
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("fastrl")
    return plain, NativeEngine(ours, **options)


def requests(num_samples=1, prompts=PROMPTS, **more):
    return [GenerationRequest(100 + i, p, num_samples, **more) for i, p in enumerate(prompts)]


def collect(engine, reqs, params):
    """{(request, sample index): sample}; checks that each sample comes once."""
    samples = list(engine.generate(reqs, params))
    found = {(s.request_id, s.sample_index): s for s in samples}
    assert len(found) == len(samples) == sum(r.num_samples for r in reqs)
    return found


def same(a, b, atol=1e-9):
    """Equal tokens and reasons, log-probs within atol, for every sample of `b`."""
    for key, sample in b.items():
        assert a[key].token_ids.tolist() == sample.token_ids.tolist(), key
        assert a[key].finish_reason == sample.finish_reason
        torch.testing.assert_close(a[key].log_probs, sample.log_probs, atol=atol, rtol=0)


@torch.no_grad()
def plain_log_probs(model, prompt, tokens, temperature=1.0):
    """Log-probs of `tokens` after `prompt` by one ordinary forward pass."""
    with keep_double(model):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_it_is_an_engine():
    assert isinstance(build("llama")[1], Engine)


@pytest.mark.parametrize("name", sorted(BUILDERS))
@pytest.mark.parametrize("fast_path", [None, False])
def test_greedy_equals_hugging_face_token_for_token(name, fast_path):
    plain, engine = build(name, torch.float32, fast_path=fast_path)
    samples = collect(engine, requests(2), SamplingParams(temperature=0, max_tokens=24))
    for request in requests():
        prompt = torch.tensor([list(request.prompt_ids)])
        expected = plain.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0, prompt.shape[1] :
        ]
        for index in range(2):
            assert samples[request.request_id, index].token_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("name", sorted(BUILDERS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_probs_are_those_of_a_plain_forward_pass(name, dtype):
    plain, engine = build(name, dtype)
    params = SamplingParams(temperature=1.3, max_tokens=15, seed=4)
    for (request_id, _), sample in collect(engine, requests(4), params).items():
        prompt = PROMPTS[request_id - 100]
        expected = plain_log_probs(plain, prompt, sample.token_ids.tolist(), temperature=1.3)
        torch.testing.assert_close(
            sample.log_probs.double(), expected, atol=1e-6 if dtype == torch.float64 else 1e-5, rtol=0
        )
        assert sample.log_probs.dtype == torch.float32 and sample.token_ids.dtype == torch.int64


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_budget_tokens": 21},
        {"kv_budget_tokens": 40},
        {"kv_budget_tokens": 75},
        {"max_prefill_tokens": 1},
        {"share_prefixes": False},
        {"fast_path": False},
    ],
    ids=str,
)
def test_a_sample_depends_on_nothing_but_itself(name, options):
    """Alone, in batches, queued for lack of space, computed together with its twins or not: the same sample."""
    # A low temperature keeps samples of a group together for a while, so that rows are shared and part late.
    params = SamplingParams(temperature=0.7, max_tokens=12, stop_token_ids=(17, 23), seed=9)
    base = collect(build(name)[1], requests(6), params)
    assert {s.finish_reason for s in base.values()} == {FinishReason.stop, FinishReason.length}
    same(base, collect(build(name, **options)[1], requests(6), params))
    if "kv_budget_tokens" in options:
        return
    engine = build(name, **options)[1]
    same(base, collect(engine, requests(6)[::-1], params))
    for request in requests(6)[:3]:
        seeds = request.sample_seeds(params)
        for index in (0, 3):
            alone = GenerationRequest(request.request_id, request.prompt_ids, 1, [seeds[index]])
            sample = collect(engine, [alone], params)[request.request_id, 0]
            assert sample.token_ids.tolist() == base[request.request_id, index].token_ids.tolist()


def test_sampled_tokens_follow_the_model():
    """First and second tokens of many samples against the probabilities of a plain forward pass."""
    plain, engine = build("qwen2")
    prompt, count = PROMPTS[1], 4000
    samples = collect(engine, [GenerationRequest(0, prompt, count)], SamplingParams(max_tokens=2, temperature=0.8))
    pairs = np.array([s.token_ids.tolist() for s in samples.values()])
    with torch.no_grad():
        first = torch.softmax(plain(torch.tensor([prompt])).logits[0, -1] / 0.8, -1).double().numpy()
        common = int(first.argmax())
        second = torch.softmax(plain(torch.tensor([[*prompt, common]])).logits[0, -1] / 0.8, -1).double().numpy()
    for tokens, p in ((pairs[:, 0], first), (pairs[pairs[:, 0] == common, 1], second)):
        assert len(tokens) > 300
        expected = len(tokens) * p
        chi_square = ((np.bincount(tokens, minlength=VOCABULARY) - expected) ** 2 / expected).sum()
        assert chi_square < VOCABULARY + 4.5 * np.sqrt(2 * VOCABULARY)


def test_equal_seeds_reproduce_and_other_seeds_differ():
    engine = build("llama")[1]
    one = collect(engine, requests(4), SamplingParams(max_tokens=10, seed=1))
    same(one, collect(engine, requests(4), SamplingParams(max_tokens=10, seed=1)))
    other = collect(engine, requests(4), SamplingParams(max_tokens=10, seed=2))
    assert sum(one[k].token_ids.tolist() == other[k].token_ids.tolist() for k in one) < 3
    twins = collect(engine, [GenerationRequest(0, PROMPTS[0], 3, [7, 8, 7])], SamplingParams(max_tokens=10))
    assert twins[0, 0].token_ids.tolist() == twins[0, 2].token_ids.tolist() != twins[0, 1].token_ids.tolist()


def greedy(engine, prompt, count):
    params = SamplingParams(temperature=0, max_tokens=count)
    return next(iter(engine.generate([GenerationRequest(0, prompt)], params))).token_ids.tolist()


def test_stopping():
    engine = build("llama")[1]
    line = greedy(engine, PROMPTS[0], 20)
    first = {token: line.index(token) for token in set(line)}
    a, b = sorted(sorted(first, key=lambda t: first[t])[3:5], key=lambda t: -first[t])  # b comes before a
    request = [GenerationRequest(0, PROMPTS[0])]

    def run(engine, **options):
        return next(iter(engine.generate(request, SamplingParams(temperature=0, **options))))

    both = build("llama", stop_token_ids=[a])[1]
    sample = run(both, max_tokens=20, stop_token_ids=(b,))  # the engine's id and the call's
    assert sample.token_ids.tolist() == line[: first[b] + 1] and sample.finish_reason == FinishReason.stop
    assert run(both, max_tokens=20).token_ids.tolist() == line[: first[a] + 1]
    assert run(both, max_tokens=20, ignore_eos=True).token_ids.tolist() == line
    at_limit = run(both, max_tokens=first[a] + 1)
    assert at_limit.token_ids.tolist() == line[: first[a] + 1] and at_limit.finish_reason == FinishReason.stop
    cut = run(both, max_tokens=first[a])
    assert cut.token_ids.tolist() == line[: first[a]] and cut.finish_reason == FinishReason.length
    one = run(engine, max_tokens=1)
    assert one.token_ids.tolist() == line[:1] and one.finish_reason == FinishReason.length
    assert len(one.log_probs) == 1


class Letters:
    """A tokenizer: id i is two letters."""

    def decode(self, ids):
        return "".join(chr(97 + i % 26) + chr(65 + i // 26) for i in ids)


def test_stop_strings_end_a_sample_where_they_first_appear():
    engine = build("llama", tokenizer=Letters())[1]
    params = SamplingParams(max_tokens=30, seed=3)
    free = collect(engine, requests(4), params)
    text = Letters().decode(free[100, 1].token_ids.tolist())
    stops = (text[9:13], text[40:47], "never this one")  # they start in the middle of a token
    ended = collect(engine, requests(4), SamplingParams(max_tokens=30, seed=3, stop=stops))
    stopped = 0
    for key, sample in free.items():
        ids = sample.token_ids.tolist()
        length = next((n for n in range(1, 31) if any(s in Letters().decode(ids[:n]) for s in stops)), None)
        expected = FinishReason.length if length is None else FinishReason.stop
        assert ended[key].token_ids.tolist() == ids[:length] and ended[key].finish_reason == expected
        stopped += length is not None
    assert 0 < stopped < len(free)
    assert ended[100, 1].token_ids.tolist() == free[100, 1].token_ids.tolist()[:7]


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(EngineError, match="stop strings need a tokenizer"):
        build("llama")[1].generate(requests(), SamplingParams(stop=("x",), max_tokens=5))


def test_a_request_may_have_its_own_temperature_and_limit():
    engine = build("qwen3")[1]
    params = SamplingParams(max_tokens=12, seed=6)
    mixed = [
        GenerationRequest(0, PROMPTS[0], 3),
        GenerationRequest(1, PROMPTS[0], 1, temperature=0.0),
        GenerationRequest(2, PROMPTS[1], 2, max_tokens=5),
    ]
    samples = collect(engine, mixed, params)
    assert samples[1, 0].token_ids.tolist() == greedy(engine, PROMPTS[0], 12)
    assert [len(samples[2, i].token_ids) for i in range(2)] == [5, 5]
    same(samples, collect(engine, mixed[:1], params))


def test_each_distinct_prompt_is_computed_once_and_common_beginnings_too(monkeypatch):
    engine = build("llama")[1]
    streams = []
    start = PrefillLayout.__init__

    def counted(self, packed, device):
        streams.append(packed.tokens)
        start(self, packed, device)

    monkeypatch.setattr(PrefillLayout, "__init__", counted)
    doubled = [*requests(3), GenerationRequest(7, PROMPTS[2], 5)]
    collect(engine, doubled, SamplingParams(max_tokens=4))
    # 5 9 4 4 30 8 7 (12 3) | 5 9 4 11 -> one more token | 7 | 40 41 42 43 44
    assert [len(tokens) for tokens in streams] == [9 + 1 + 1 + 5]


def test_samples_that_agree_so_far_are_computed_once(monkeypatch):
    _, engine = build("llama")
    rows = []
    hidden = engine._runner.hidden

    def counted(tokens, positions, layout):
        rows.append(len(tokens))
        return hidden(tokens, positions, layout)

    monkeypatch.setattr(engine._runner, "hidden", counted)
    collect(engine, [GenerationRequest(0, PROMPTS[0], 5)], SamplingParams(temperature=0, max_tokens=4))
    assert rows == [7, 1, 1, 1]
    assert vars(engine.last_call) == {"passes": 4, "prompt_tokens": 7, "decode_rows": 3, "drawn_tokens": 20}


def test_samples_stream_in_the_order_they_finish():
    engine = build("llama", stop_token_ids=[17, 23, 5])[1]
    lengths, running = [], []
    for sample in engine.generate(requests(8), SamplingParams(max_tokens=16, seed=2)):
        lengths.append(len(sample.token_ids))
        running.append(engine.health().num_running)
        assert not torch.is_inference_mode_enabled()
        assert not sample.log_probs.is_inference() and not sample.token_ids.is_inference()
    assert lengths == sorted(lengths) and len(set(lengths)) > 3
    assert running[0] > 0 and running[-1] == 0


def test_the_budget_holds_and_what_does_not_fit_waits():
    budget = 48
    engine = build("llama", kv_budget_tokens=budget)[1]
    waited = 0
    seen = []
    for sample in engine.generate(requests(6), SamplingParams(max_tokens=8)):
        health = engine.health()
        assert health.kv_tokens_used <= budget == health.kv_tokens_budget
        assert health.num_running * 8 <= budget
        waited = max(waited, health.num_waiting)
        seen.append(sample.request_id)
    assert waited > 0
    assert seen[0] == 100 and seen[-1] == 104  # first come, first served
    health = engine.health()
    assert (health.kv_tokens_used, health.num_running, health.num_waiting) == (0, 0, 0)


def test_a_sample_that_can_never_fit_is_an_error():
    engine = build("llama", kv_budget_tokens=20)[1]
    with pytest.raises(EngineError, match=r"prompt of 9 tokens and .* up to 12 need 21 .*tokens is 20"):
        engine.generate(requests(), SamplingParams(max_tokens=12))
    assert len(list(engine.generate(requests(), SamplingParams(max_tokens=11)))) == 5


def test_abort_gives_what_there_is():
    engine = build("llama", stop_token_ids=[17, 23, 5], kv_budget_tokens=100)[1]
    params = SamplingParams(max_tokens=20, seed=2)
    whole = collect(engine, requests(6), params)
    got = {}
    for sample in engine.generate(requests(6), params):
        if not got:
            engine.abort()
        got[sample.request_id, sample.sample_index] = sample
    assert set(got) == set(whole)
    aborted = [k for k, s in got.items() if s.finish_reason == FinishReason.abort]
    assert aborted and any(len(got[k].token_ids) == 0 for k in aborted) and any(len(got[k].token_ids) for k in aborted)
    for key in aborted:
        length = len(got[key].token_ids)
        assert got[key].token_ids.tolist() == whole[key].token_ids.tolist()[:length]
    same(whole, collect(engine, requests(6), params))  # and the engine goes on


def test_closing_the_iterator_early_frees_everything():
    engine = build("llama")[1]
    stream = engine.generate(requests(4), SamplingParams(max_tokens=1))
    next(stream)
    with pytest.raises(EngineError, match="another generate is running"):
        engine.generate(requests(), SamplingParams())
    with pytest.raises(EngineError, match="while samples are being generated"):
        engine.update_weights(engine.model, 1)
    stream.close()
    assert engine.health().num_running == 0
    collect(engine, requests(2), SamplingParams(max_tokens=3))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_updates_are_seen_and_counted(name):
    plain, engine = build(name, torch.float32)
    before = collect(engine, requests(), SamplingParams(temperature=0, max_tokens=10))
    assert {s.policy_version for s in before.values()} == {0}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for a, b in zip(plain.parameters(), engine.model.parameters()):
            change = torch.randn(a.shape, generator=generator) * 0.1
            a.add_(change)
            b.add_(change)
    engine.update_weights(engine.model, 7)
    after = collect(engine, requests(), SamplingParams(temperature=0, max_tokens=10))
    assert {s.policy_version for s in after.values()} == {7} == {engine.health().policy_version}
    assert any(before[k].token_ids.tolist() != after[k].token_ids.tolist() for k in before)
    for (request_id, _), sample in after.items():
        expected = plain_log_probs(plain, PROMPTS[request_id - 100], sample.token_ids.tolist())
        torch.testing.assert_close(sample.log_probs.double(), expected, atol=1e-5, rtol=0)


def test_training_mode_and_gradients_are_left_alone():
    _, engine = build("llama")
    engine.model.train()
    collect(engine, requests(), SamplingParams(max_tokens=3))
    assert engine.model.training and all(m.training for m in engine.model.modules())
    assert all(p.requires_grad and not p.is_inference() for p in engine.model.parameters())


def test_sleep_wake_and_close():
    _, engine = build("llama", torch.float32)
    params = SamplingParams(max_tokens=5)
    base = collect(engine, requests(2), params)
    engine.sleep(1)
    assert engine.health().sleeping
    with pytest.raises(EngineError, match="sleeping"):
        engine.generate(requests(), params)
    engine.wake(["weights"])
    engine.update_weights(engine.model, 1)
    assert engine.health().sleeping
    engine.wake(["kv"])
    same(base, collect(engine, requests(2), params))
    engine.reset_prefix_cache()
    engine.close()
    engine.close()
    assert not engine.health().alive
    with pytest.raises(EngineError, match="closed"):
        engine.generate(requests(), params)


WRONG = {
    "empty prompt": ([GenerationRequest(3, [])], "request 3 has an empty prompt"),
    "twice": ([GenerationRequest(3, [1]), GenerationRequest(3, [2])], "request 3 appears twice"),
    "vocabulary": ([GenerationRequest(3, [1, 61])], "prompt id 61"),
    "negative id": ([GenerationRequest(3, [-1])], "prompt id -1"),
    "no samples": ([GenerationRequest(3, [1], 0)], "0 samples"),
    "seeds": ([GenerationRequest(3, [1], 3, [1, 2])], "2 seeds for 3 samples"),
    "limit": ([GenerationRequest(3, [1], max_tokens=0)], "max_tokens = 0"),
    "temperature": ([GenerationRequest(3, [1], temperature=-1.0)], "temperature = -1.0"),
    "context": ([GenerationRequest(3, [1] * 120)], "exceed the model's context of 128"),
}


@pytest.mark.parametrize(("reqs", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_requests_are_named(reqs, message):
    with pytest.raises(EngineError, match=message):
        build("llama")[1].generate(reqs, SamplingParams(max_tokens=10))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_wrong_parameters_are_named(options):
    with pytest.raises(EngineError, match=next(iter(options))):
        SamplingParams(**options)


def test_the_context_may_be_filled_to_the_last_position():
    plain, engine = build("gpt2", torch.float32)
    prompt = [3] * 120
    sample = next(iter(engine.generate([GenerationRequest(0, prompt)], SamplingParams(temperature=0, max_tokens=9))))
    torch.testing.assert_close(
        sample.log_probs[:8].double(), plain_log_probs(plain, prompt, sample.token_ids.tolist()[:8]), atol=1e-5, rtol=0
    )
    with pytest.raises(EngineError, match="context"):
        engine.generate([GenerationRequest(0, prompt)], SamplingParams(max_tokens=10))


def test_no_requests_give_no_samples():
    assert list(build("llama")[1].generate([], SamplingParams())) == []


def test_a_model_with_other_attention_is_refused():
    with pytest.raises(ModelError, match="load it with fastrl"):
        NativeEngine(tiny_model("llama"))


def test_another_module_is_refused():
    _, engine = build("llama")
    with pytest.raises(EngineError, match="the module it was made with"):
        engine.update_weights(tiny_model("llama"), 1)
