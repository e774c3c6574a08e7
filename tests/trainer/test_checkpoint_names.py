"""Names and pieces of a checkpoint out of the trainer's tensors: what `save_pretrained` writes, exactly."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm_models import write_vllm_folder

from fastrl.dist.weight_source import named_tensors
from fastrl.dist.weight_sync import WeightReceiver, WeightSender
from fastrl.models.load import load_model
from fastrl.trainer.expected_weights import ExpectedWeights

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from engine_child import Child


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("qwen2", False), ("mixtral", False), ("qwen3_moe", True), ("qwen3_moe", False)]
)
def test_an_engine_is_given_the_tensors_of_the_checkpoint(tmp_path, kind, tied):
    folder = write_vllm_folder(tmp_path, kind, tied=tied)
    written = load_file(tmp_path / "model.safetensors")  # by the library that trains
    model = load_model(folder)
    expected = ExpectedWeights(folder, torch.float32)

    def engine():
        receiver = WeightReceiver(sender.address, sender.token, tied=True, timeout_s=30)
        receiver.check_manifest(expected.specs)
        taken = {name: tensor.clone() for name, tensor in expected.checkpoint(receiver.tensors())}
        receiver.close()
        return taken

    with WeightSender(model, bucket_bytes=1 << 14, dtype=torch.float32, timeout_s=30) as sender:  # experts are split
        child = Child(engine)
        sender.send(1)
        taken = child.result()
    if tied:
        written["lm_head.weight"] = written["model.embed_tokens.weight"]
    assert taken.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(taken[name], tensor), name
    experts = {name for name, _ in named_tensors(model) if "experts" in name}
    assert expected.renamed >= experts and (kind in ("mixtral", "qwen3_moe")) == bool(experts)
