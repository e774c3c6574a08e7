"""Adapters: only they are trained and saved, off they give the starting policy, merged they give the trained one."""

import json
from pathlib import Path

import pytest
import torch
from tiny_folder import short_run, write_tiny_folder
from transformers import AutoModelForCausalLM

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.dist.weight_lora import merged_state
from fastrl.errors import ConfigError, ModelError
from fastrl.models.load import load_model
from fastrl.models.lora import adapters_off, add_lora, is_adapter
from fastrl.run import run_training
from fastrl.trainer.export import export_run

peft = pytest.importorskip("peft")
IDS = torch.tensor([[4, 8, 15, 16, 23, 42]])
LORA = ["model.lora_rank=4", "model.lora_targets=[q_proj,v_proj,down_proj]", "algorithm.kl_loss_coef=0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def logits(model):
    return model(input_ids=IDS).logits


def test_an_adapter_by_hand(folder):
    """W + (alpha / rank) B A, written out."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = add_lora(load_model(folder, dtype=torch.float64), 2, alpha=6.0, targets=["q_proj"])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if is_adapter(n)
    }
    with torch.no_grad():
        assert torch.allclose(logits(plain), plain_logits(model), atol=1e-6)  # B starts at 0
        for i, layer in enumerate(model.model.layers):
            b = torch.arange(64, dtype=torch.float64).view(32, 2) / (100 + i)
            layer.self_attn.q_proj.lora_B["default"].weight.copy_(b)
            a = layer.self_attn.q_proj.lora_A["default"].weight
            plain.model.layers[i].self_attn.q_proj.weight.add_(3.0 * b @ a)
        assert torch.allclose(logits(plain), plain_logits(model), atol=1e-6)
        merged = dict(merged_state(model))
        assert merged.keys() == plain.state_dict().keys()
        assert all(torch.allclose(merged[k], v, atol=1e-14) for k, v in plain.state_dict().items())
        start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with adapters_off(model):
            assert torch.allclose(logits(start), plain_logits(model), atol=1e-6)
        assert not torch.allclose(logits(start), plain_logits(model), atol=1e-3)


def plain_logits(model):
    """Logits through the library's own attention, whose softmax is float32."""
    model.set_attn_implementation("sdpa")
    return model(input_ids=IDS).logits


def test_names_that_do_not_exist(folder):
    with pytest.raises(ModelError, match=r"model\.lora_targets: no linear layer is called nothing_proj"):
        add_lora(load_model(folder), 2, alpha=4.0, targets=["q_proj", "nothing_proj"])


def train(folder, where, *more, resume=None):
    overrides = short_run(folder, where, *LORA, "run.dtype=float64", *more)
    return run_training(load_config([], overrides), resume=resume)


def rows(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_saves_and_exports_adapters(folder, tmp_path):
    run = train(folder, tmp_path / "a", "optim.total_steps=3", "optim.lr=1e-2")
    tensors = load_checkpoint(run)[0]["policy"]["model"]
    assert tensors and all(is_adapter(name) for name in tensors)
    history = rows(run)
    assert history[0]["kl/reference"] == pytest.approx(0.0, abs=1e-12) and history[-1]["kl/reference"] > 1e-6
    merged = AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / "merged"), dtype=torch.float64)
    adapter = export_run(run, tmp_path / "adapter", adapter_only=True)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    start = logits(base)
    on_top = peft.PeftModel.from_pretrained(base, adapter).to(torch.float64)
    with torch.no_grad():
        assert torch.allclose(logits(merged), logits(on_top), atol=1e-9)
        assert not torch.allclose(logits(merged), start, atol=1e-4)


def test_resumed_and_on_two_ranks(folder, tmp_path):
    whole = train(folder, tmp_path / "a", "optim.total_steps=3")
    train(folder, tmp_path / "b", "optim.total_steps=1")
    again = train(folder, tmp_path / "b", "optim.total_steps=3", resume="auto")
    two = train(folder, tmp_path / "c", "optim.total_steps=3", "parallel.processes=2", "parallel.shard=1")
    expected = load_checkpoint(whole)[0]["policy"]["model"]
    for run, tolerance in ((again, 0.0), (two, 1e-10)):
        found = load_checkpoint(run)[0]["policy"]["model"]
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[k], expected[k], rtol=0, atol=tolerance) for k in expected)


def test_exporting_adapters_of_a_run_without(folder, tmp_path):
    run = run_training(load_config([], short_run(folder, tmp_path, "optim.total_steps=1")))
    with pytest.raises(ConfigError, match=r"model\.lora_rank = 0"):
        export_run(run, tmp_path / "x", adapter_only=True)
