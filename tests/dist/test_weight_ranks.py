"""Sharded models: every rank takes part in the gathers and every rank's engine gets the whole weights."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from two_ranks import run_ranks

SETUP = f"""
import sys, os
sys.path.insert(0, {str(Path(__file__).parent)!r})
from engine_child import Child
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from fastrl.dist.weight_sync import TensorSpec, WeightReceiver, WeightSender
from fastrl.errors import WeightError

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(131, 24)  # odd: the ranks' shards differ in size
        self.layers = nn.ModuleList(nn.Linear(24, n) for n in (7, 33, 1000, 1))
        self.register_buffer("counts", torch.arange(11))
        self.head = nn.Linear(24, 131, bias=False)
        self.head.weight = self.embed.weight

whole = {{n: t.clone() for n, t in Policy().state_dict().items()}}
model = Policy()
mesh = init_device_mesh("cpu", (size,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

def specs(dtype):
    return [TensorSpec(n, tuple(t.shape), dtype if t.is_floating_point() else t.dtype) for n, t in whole.items()]

def engine(address, token, dtype, die_at=None):
    receiver = WeightReceiver(address, token, tied=True, timeout_s=30)
    receiver.check_manifest(specs(dtype))
    wrong = []
    for name, tensor in receiver.tensors():
        if name == die_at:
            os.kill(os.getpid(), 9)
        want = whole[name].to(dtype) if tensor.is_floating_point() else whole[name]
        if not torch.equal(tensor, want):
            wrong.append(name)
    return wrong, sorted(receiver.checksums)
"""

EQUAL = (
    SETUP
    + """
out = []
for dtype in (torch.float32, torch.bfloat16):
    for bucket_bytes in (8192, 1 << 20):
        sender = WeightSender(model, bucket_bytes=bucket_bytes, dtype=dtype, timeout_s=30)
        child = Child(lambda: engine(sender.address, sender.token, dtype))
        delivery = sender.send(1)
        wrong, names = child.result()
        sender.close()
        out.append([wrong, names, delivery.bytes])
return out
"""
)


def test_every_ranks_engine_gets_the_whole_weights():
    first, second = run_ranks(EQUAL)
    assert first == second
    names = ["counts", "embed.weight", *(f"layers.{i}.{leaf}" for i in range(4) for leaf in ("bias", "weight"))]
    numbers = 131 * 24 + sum(25 * n for n in (7, 33, 1000, 1))
    for (wrong, got, size), itemsize in zip(first, (4, 4, 2, 2)):
        assert wrong == [] and got == names
        assert size == numbers * itemsize + 11 * 8


ONE_DIES = (
    SETUP
    + """
sender = WeightSender(model, bucket_bytes=8192, timeout_s=30)
child = Child(lambda: engine(sender.address, sender.token, torch.float32, "layers.1.bias" if rank == 1 else None))
try:
    sender.send(1)
    outcome = child.result()[0]
except WeightError as error:
    outcome = str(error)
sender.close()
return outcome
"""
)


def test_an_engine_killed_on_one_rank_does_not_hold_up_the_other():
    first, second = run_ranks(ONE_DIES, timeout=60)
    assert first == []
    assert "the engine process ended during the update to version 1" in second


REFUSED = (
    SETUP
    + """
def wrong():
    receiver = WeightReceiver(sender.address, sender.token, timeout_s=30)
    try:
        receiver.check_manifest(specs(torch.float32)[1:])
    except WeightError as error:
        return str(error)

sender = WeightSender(model, bucket_bytes=8192, timeout_s=30)
child = Child(wrong if rank == 0 else lambda: engine(sender.address, sender.token, torch.float32)[0])
try:
    sender.send(1)
    outcome = child.result()
except WeightError as error:
    outcome = str(error)
sender.close()
return outcome
"""
)


def test_a_refusal_on_one_rank_does_not_hold_up_the_other():
    first, second = run_ranks(REFUSED, timeout=60)
    assert "refused" in first and second == []
