"""What is sent: adapters merged or alone, and deliveries inside one process."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fastrl.dist.weight_sync import TensorSpec, WeightSender
from fastrl.errors import WeightError

sys.path.insert(0, str(Path(__file__).parent))


class AdaptedLinear(nn.Module):
    """A linear layer in PEFT's layout, written from its documentation."""

    def __init__(self, base, rank, scaling, names=("default",), fan_in_fan_out=False):
        super().__init__()
        self.base_layer = base
        out, into = base.weight.T.shape if fan_in_fan_out else base.weight.shape
        self.lora_A = nn.ModuleDict({n: nn.Linear(into, rank, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(rank, out, bias=False) for n in names})
        self.scaling = {n: scaling for n in names}
        self.active_adapters = list(names)
        self.fan_in_fan_out = fan_in_fan_out


def adapted_model():
    torch.manual_seed(0)
    inner = nn.Module()
    inner.embed = nn.Embedding(10, 6)
    inner.q_proj = AdaptedLinear(nn.Linear(6, 8), 2, 0.5, names=("default", "other"))
    inner.c_attn = AdaptedLinear(nn.Linear(7, 6, bias=False), 3, 2.0, fan_in_fan_out=True)  # weight [in 6, out 7]
    wrapper = nn.Module()
    wrapper.base_model = nn.Module()
    wrapper.base_model.model = inner
    return wrapper, inner


def received(model, expected=None, **options):
    """What an engine of the same process reads, through the in-process transport."""
    got = {}

    def load(receiver):
        receiver.check_manifest(receiver.manifest if expected is None else expected)
        for name, tensor in receiver.tensors():
            got[name] = tensor.clone()

    with WeightSender(model, transport="in_process", **options) as sender:
        sender.attach(load, tied=True)
        delivery = sender.send(3)
    return got, delivery


def test_merged_adapters_arrive_as_plain_weights():
    model, inner = adapted_model()
    got, _ = received(model)
    assert set(got) == {"embed.weight", "q_proj.weight", "q_proj.bias", "c_attn.weight"}
    q, c = inner.q_proj, inner.c_attn
    want = q.base_layer.weight.double()
    for name in ("default", "other"):
        want = want + 0.5 * q.lora_B[name].weight.double() @ q.lora_A[name].weight.double()
    torch.testing.assert_close(got["q_proj.weight"].double(), want, atol=1e-6, rtol=1e-6)
    want = c.base_layer.weight.double() + 2.0 * (c.lora_B["default"].weight.double() @ c.lora_A["default"].weight.double()).T
    torch.testing.assert_close(got["c_attn.weight"].double(), want, atol=1e-6, rtol=1e-6)
    assert torch.equal(got["q_proj.bias"], q.base_layer.bias) and torch.equal(got["embed.weight"], inner.embed.weight)


def test_the_adapter_alone_is_its_matrices():
    model, inner = adapted_model()
    inner.q_proj.active_adapters = ["other"]
    got, delivery = received(model, lora="adapter")
    assert set(got) == {f"base_model.model.{m}.lora_{p}.weight" for m in ("q_proj", "c_attn") for p in "AB"}
    assert torch.equal(got["base_model.model.q_proj.lora_B.weight"], inner.q_proj.lora_B["other"].weight)
    assert delivery.bytes == 4 * (2 * 6 + 8 * 2 + 3 * 6 + 7 * 3)
    inner.q_proj.active_adapters = ["default", "other"]
    with pytest.raises(WeightError, match=r"q_proj has the active adapters default, other: an engine takes one"):
        received(model, lora="adapter")


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_merging_equals_peft():
    import peft

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "1"], init_lora_weights=False))
    got, _ = received(model)
    adapter, _ = received(model, lora="adapter")
    saved = peft.get_peft_model_state_dict(model)
    assert set(adapter) == set(saved) and all(torch.equal(adapter[n], saved[n]) for n in saved)
    merged = model.merge_and_unload().state_dict()
    assert set(got) == set(merged)
    for name, tensor in merged.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=1e-6)


def test_in_process_every_name_and_type_arrives_without_staging():
    torch.manual_seed(0)
    model = nn.Module()
    model.embed, model.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
    model.head = nn.Linear(4, 9, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("counts", torch.arange(3))
    model.empty = nn.Parameter(torch.zeros(0, 4))
    got, delivery = received(model, dtype=torch.bfloat16)
    state = model.state_dict()
    assert set(got) == set(state)
    for name, tensor in state.items():
        assert torch.equal(got[name], tensor if name == "counts" else tensor.bfloat16()), name
    assert delivery.version == 3 and delivery.transport == "in_process"
    assert set(delivery.checksums) == set(state) - {"head.weight"}


def test_in_process_a_wrong_manifest_and_an_engine_that_writes_are_refused():
    model = nn.Linear(3, 2)
    wrong = [TensorSpec("weight", (2, 4), None), TensorSpec("bias", (2,), torch.float16)]
    with pytest.raises(WeightError, match=r"weight is \[2, 3\] .*and \[2, 4\] .*bias is float32 .*and float16"):
        received(model, wrong)

    def scribbles(receiver):
        receiver.check_manifest(receiver.manifest)
        for _, tensor in receiver.tensors():
            tensor.add_(1)

    def stops(receiver):
        receiver.check_manifest(receiver.manifest)
        next(receiver.tensors())

    for load, text in ((scribbles, "for weight, bias"), (stops, "did not read the update to version 1 to its end")):
        sender = WeightSender(nn.Linear(3, 2), transport="in_process", dtype=torch.bfloat16)
        sender.attach(load)
        with pytest.raises(WeightError, match=text):
            sender.send(1)
    with pytest.raises(WeightError, match=r"attach\(\)"):
        WeightSender(model, transport="in_process").send(1)
    with pytest.raises(WeightError, match="transport = disk: expected one of auto"):
        WeightSender(model, transport="disk")


def test_a_device_that_cannot_share_falls_back_and_says_why():
    sender = WeightSender(nn.Linear(2, 2), transport="auto")
    assert sender._candidates() == ["shared_memory"] and sender.fallback == "the weights are on cpu"
    sender.close()
    sender = WeightSender(nn.Linear(2, 2), transport="cuda_ipc")
    with pytest.raises(WeightError, match=r"rollout\.weight_transport = cuda_ipc: the weights are on cpu; use auto"):
        sender._make("cuda_ipc")
    sender.close()
