"""The fast forward pass: equal to the model's own, and not used where it would not be."""

import copy

import numpy as np
import pytest
import torch
from test_native import PROMPTS, build, collect, plain_log_probs, requests, same
from tiny_models import tiny_model

from fastrl.rollout.engine import SamplingParams
from fastrl.rollout.native import NativeEngine
from fastrl.rollout.plain_decoder import PlainDecoder, why_not_plain
from fastrl.rollout.prefill import PackedPrompts, PrefillLayout
from fastrl.rollout.runner import ModuleRunner

CPU = torch.device("cpu")
PLAIN = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_forward_passes_draw_the_same_samples(name, dtype):
    fast = build(name, dtype)[1]
    general = build(name, dtype, fast_path=False)[1]
    assert fast.general_because is None and isinstance(fast._runner, PlainDecoder)
    assert isinstance(general._runner, ModuleRunner)
    assert fast._runner.can_pack == (dtype == torch.float32)
    params = SamplingParams(max_tokens=20, temperature=0.9, stop_token_ids=(11, 29), seed=1)
    atol = 1e-6 if dtype == torch.float64 else 2e-5
    same(collect(general, requests(4), params), collect(fast, requests(4), params), atol)


@pytest.mark.parametrize("name", PLAIN)
def test_bfloat16_products_are_as_close_to_float32_as_autocast_is(name):
    plain, engine = build(name, torch.float32, autocast_dtype=torch.bfloat16)
    assert engine.general_because is None
    ours, theirs = [], []
    for (request_id, _), sample in collect(engine, requests(4), SamplingParams(max_tokens=12, seed=2)).items():
        ids, prompt = sample.token_ids.tolist(), PROMPTS[request_id - 100]
        exact = plain_log_probs(plain, prompt, ids)
        with torch.autocast("cpu", torch.bfloat16):
            theirs.append((plain_log_probs(plain, prompt, ids) - exact).abs().mean())
        ours.append((sample.log_probs - exact).abs().mean())
    ours, theirs = float(torch.stack(ours).mean()), float(torch.stack(theirs).mean())
    assert 1e-3 < ours < 1.5 * theirs


def test_other_models_take_their_own_forward_pass():
    for name in ("gpt2", "gemma", "gemma2"):
        engine = build(name)[1]
        assert "is not a plain decoder" in engine.general_because
        assert isinstance(engine._runner, ModuleRunner)


def test_changed_models_are_not_plain():
    hooked = tiny_model("llama")
    hooked.model.layers[1].mlp.register_forward_hook(lambda *a: None)
    assert "model.layers.1.mlp has forward hooks".removeprefix("model.") in why_not_plain(hooked)

    class Adapter(torch.nn.Linear):
        pass

    adapted = tiny_model("llama")
    adapted.model.layers[0].self_attn.q_proj.__class__ = Adapter
    assert "q_proj is Adapter" in why_not_plain(adapted)
    other = tiny_model("qwen2")
    other.model.layers[2].mlp.act_fn = torch.nn.GELU()
    assert "activation is GELU" in why_not_plain(other)


def test_a_probe_catches_what_structure_does_not():
    model = copy.deepcopy(tiny_model("llama", dtype=torch.float32))
    model.set_attn_implementation("fastrl")
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: 1.01 * forward(x)
    with pytest.warns(UserWarning, match="fast forward pass not used, its logits differ"):
        engine = NativeEngine(model)
    assert isinstance(engine._runner, ModuleRunner) and "differ" in engine.general_because


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_few_rows_are_filled_up_without_a_trace(rows):
    model = tiny_model("llama", dtype=torch.float32)
    model.set_attn_implementation("fastrl")
    prompt = [list(range(3, 3 + rows))]
    found = []
    for runner in (PlainDecoder(model, CPU), ModuleRunner(model, CPU)):
        packed = PackedPrompts(prompt)
        layout = PrefillLayout(packed, CPU)
        with torch.inference_mode():
            found.append(runner.hidden(packed.tokens, packed.positions, layout))
        assert layout.kv[0].shape[2] == rows
    assert found[0].shape == (rows, 32)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_sleep_frees_the_copies():
    _, engine = build("llama", torch.float32)
    collect(engine, requests(), SamplingParams(max_tokens=2))
    assert engine._runner._weights is not None
    engine.sleep()
    assert engine._runner._weights is None


def test_weights_are_packed_only_where_that_pays():
    """Packing costs a few forward passes. Calls before must not decide: a resumed run has none."""
    _, engine = build("llama", torch.float32)
    runner = engine._runner
    long, short = SamplingParams(max_tokens=20, seed=1), SamplingParams(max_tokens=3, seed=1)
    base = collect(engine, requests(2), short)
    assert not runner.packs  # no more than 3 passes to come
    fresh = collect(engine, requests(2), long)
    assert runner.packs
    same(base, collect(engine, requests(2), short), 0.0)
    assert not runner.packs
    engine.update_weights(engine.model, 1)
    stopped = SamplingParams(max_tokens=20, seed=1, stop_token_ids=tuple(range(40)))  # ends at once
    collect(engine, requests(2), stopped)
    same(fresh, collect(engine, requests(2), long), 0.0)
    assert runner.packs


def test_sharded_parameters_are_gathered(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    params = SamplingParams(max_tokens=8, seed=1)
    base = collect(build("qwen2", torch.float32)[1], requests(3), params)
    model = tiny_model("qwen2", dtype=torch.float32)
    model.set_attn_implementation("fastrl")
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        engine = NativeEngine(model)
        assert engine.general_because is None
        same(base, collect(engine, requests(3), params), 1e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        engine.update_weights(model, 1)
        changed = collect(engine, requests(3), params)
        assert any(changed[k].token_ids.tolist() != base[k].token_ids.tolist() for k in base)
    finally:
        destroy_process_group()
