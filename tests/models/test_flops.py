"""Operations of a pass: by hand, and against torch's own counter on the model with its own attention."""

import pytest
import torch
from test_families import FAMILIES, SIZES
from tiny_models import ragged_batch, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fastrl.data.packing import pack
from fastrl.models.flops import PEAK_FLOPS, forward_flops, peak_flops
from fastrl.models.head import trunk
from fastrl.models.load import ValueModel


def test_llama_by_hand():
    found = forward_flops(tiny_model("llama"))
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v, o, gated product
    assert found.row == 2 * 3 * layer
    assert found.key == 4 * 3 * 4 * 8
    assert found.head_row == 2 * 61 * 32
    value = forward_flops(ValueModel(trunk(tiny_model("llama")), "auto"))
    assert (value.row, value.head_row) == (found.row, 2 * 32)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_torch_counts_the_same(family):
    """Eager attention computes all n^2 scores of n rows."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    n = 7
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(n)[None])
    found = forward_flops(model)
    assert counter.get_total_flops() == found.row * n + found.key * n * n + found.head_row * n


def test_of_four_experts_two_count():
    config = CONFIG_MAPPING["mixtral"](**SIZES, **FAMILIES["mixtral"])
    found = forward_flops(AutoModelForCausalLM.from_config(config))
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 4 * 32 + 2 * 3 * 32 * 48  # attention, router, two experts
    assert found.row == 2 * 4 * layer


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_figures(family):
    sizes = {**SIZES, **FAMILIES[family]}
    sizes |= {"layer_types": None} if family == "exaone4" else {}
    with torch.device("meta"):
        found = forward_flops(AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes)))
    assert found.row > 0 and found.key >= 4 * 2 * 4 * 8 and found.head_row == 2 * 61 * 32


def test_an_update_is_three_forwards_and_two_with_frozen_weights():
    model = tiny_model("llama")
    (micro,) = pack(ragged_batch([4, 3], [[3, 5], [2]]), max_tokens=100)
    found = forward_flops(model)
    forward = found.row * micro.num_rows + found.key * micro.num_keys + found.head_row * micro.num_tokens
    assert found.forward(micro) == forward
    assert found.update(micro) == pytest.approx(3 * forward)
    model.requires_grad_(False)
    frozen = forward_flops(model)
    assert frozen.update(micro) == pytest.approx(2 * forward + found.key * micro.num_keys)


def test_keys_are_the_positions_that_rows_read():
    for share in (True, False):
        batch = ragged_batch([4, 6, 3], [[3, 5, 1], [2, 0, 4], [6, 2]], num_distinct=2)
        for micro in pack(batch, max_tokens=30, share_prompts=share):
            assert micro.num_keys == int((micro.position_ids + 1).sum())


def test_peaks_of_gpus_by_name(monkeypatch):
    assert peak_flops(torch.device("cpu")) is None
    for name, peak in {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unknown 9000")
    assert peak_flops(torch.device("cuda")) is None
    assert PEAK_FLOPS["H200"] == PEAK_FLOPS["H100"]
