"""Sharded models: read into shards they equal the whole ones, tied heads stay tied, dtypes are what was asked for."""

import sys
from pathlib import Path

import pytest
from tiny_folder import write_tiny_folder

sys.path.insert(0, str(Path(__file__).parent))
from launched import launch_body

HELPERS = """
from fastrl.dist.fsdp import load_sharded, shard_model, own_head, decoder_layers, reshard
from fastrl.dist.mesh import make_mesh
from fastrl.errors import ModelError
from fastrl.models.forward import hidden_rows, inside, inside_head
from fastrl.models.head import logits_of, trunk
from fastrl.models.load import load_critic, load_model
from fastrl.data.packing import empty_micro_batch, pack
from tiny_models import ragged_batch, tiny_model
cpu = torch.device("cpu")
mesh = make_mesh(cpu, 1, None)
micro = pack(ragged_batch([4, 6], [[3, 5], [2]], seed=rank), max_tokens=1000)[0]

def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t

def logits(model, micro):
    return inside(model, lambda: inside_head(model, logits_of, hidden_rows(model, micro)))

def equal(a, b):
    names = dict(a.named_parameters()).keys()
    assert names == dict(b.named_parameters()).keys()
    assert all(torch.equal(whole(p), q) for p, q in zip(a.parameters(), b.parameters()))
    buffers = dict(b.named_buffers())
    assert buffers and all(torch.equal(x, buffers[name]) for name, x in a.named_buffers())
"""

READ = (
    HELPERS
    + """
found = {{}}
for name in ("llama", "qwen2"):
    path = "{folder}/" + name
    plain = load_model(path, dtype=torch.float64)
    model = load_sharded(load_model, path, mesh, cpu, dtype=torch.float64)
    equal(model, plain)
    local = sum(p.to_local().numel() for p in model.parameters())
    total = sum(p.numel() for p in plain.parameters())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    found[name] = [own_head(model) is None, head.weight is embedding.weight, 0.4 < local / total < 0.6]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        ours = logits(model, micro)
        assert (ours - logits(plain, micro)).abs().max() < 1e-12
        ours.square().sum().backward()
        own = logits(plain, micro).square().sum()
        own.backward()
        for p in plain.parameters():
            dist.all_reduce(p.grad)
        for p, q in zip(model.parameters(), plain.parameters()):
            assert (whole(p.grad) - q.grad).norm() <= 1e-12 * (1 + q.grad.norm())
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    if name == "llama":
        assert torch.equal(whole(head.weight), whole(embedding.weight))
critic, own = load_sharded(load_critic, path, mesh, cpu, dtype=torch.float64), load_critic(path, dtype=torch.float64)
equal(critic, own)
return found
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen2"):
        write_tiny_folder(folder / name, name=name)
    return folder


def test_read_into_shards(folder):
    expected = {"llama": [True, True, True], "qwen2": [False, False, True]}
    assert launch_body(READ.format(folder=folder), 2) == [expected] * 2


REST = (
    HELPERS
    + """
from fastrl.rollout.engine import GenerationRequest, SamplingParams
from fastrl.rollout.native import NativeEngine
out = []
# bfloat16: gathered in it, masters and gradients in float32
model = load_sharded(load_model, "{folder}/llama", mesh, cpu, dtype=torch.bfloat16)
value = logits(model, micro)
value.float().square().sum().backward()
out.append([str(value.dtype), str(next(model.parameters()).dtype), str(next(model.parameters()).grad.dtype)])
# a rank without data takes part and adds zeros
model.zero_grad()
for m in [micro] if rank == 0 else [empty_micro_batch(cpu)]:
    logits(model, m).float().square().sum().backward()
out.append(bool(whole(next(model.parameters()).grad).isfinite().all()))
# generation: one rank has nothing to generate
engine = NativeEngine(model.eval())
requests = [GenerationRequest(0, [4, 5, 6], 2, seeds=[1, 2])] if rank == 0 else []
engine.sleep()
engine.wake()
out.append(len(list(engine.generate(requests, SamplingParams(max_tokens=4)))))
try:
    from fastrl.models.load import prepare_model
    NativeEngine(shard_model(prepare_model(tiny_model("gemma")), mesh, dtype=torch.float64))
except ModelError as error:
    out.append("parallel.shard = 1" in str(error))
return out
"""
)


def test_types_idle_ranks_and_generation(folder):
    first, second = launch_body(REST.format(folder=folder), 2)
    types = ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert first == [types, True, 2, True]
    assert second == [types, True, 0, True]
