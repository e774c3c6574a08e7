"""Sharded models: every rank takes part in the gathers and every rank's engine gets the whole weights."""

import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("size", [2, 4])
def test_every_ranks_engine_gets_the_whole_weights(size):
    first, *others = run_ranks(EQUAL, size=size)
    assert all(other == first for other in others)
    names = ["counts", "embed.weight", *(f"layers.{i}.{leaf}" for i in range(4) for leaf in ("bias", "weight"))]
    numbers = 131 * 24 + sum(25 * n for n in (7, 33, 1000, 1))
    for (wrong, got, size), itemsize in zip(first, (4, 4, 2, 2)):
        assert wrong == [] and got == names
        assert size == numbers * itemsize + 11 * 8


GATHERS = (
    SETUP
    + """
from fastrl.dist import weight_buckets, weight_gather
events = []
gather, fill = weight_gather._all_gather, weight_buckets.SharedMemorySend.fill

def gathering(out, mine, **options):
    events.append("gather")
    return gather(out, mine, **options)

def filling(self, slot, parts, seen=None):
    events.append("fill")
    return fill(self, slot, parts, seen)

weight_gather._all_gather, weight_buckets.SharedMemorySend.fill = gathering, filling
if HYBRID:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = Policy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
sender = WeightSender(model, bucket_bytes=16384, dtype=torch.bfloat16, timeout_s=30)
child = Child(lambda: engine(sender.address, sender.token, torch.bfloat16))
delivery = sender.send(1)
wrong, _ = child.result()
sender.close()
return [wrong, events, [s.bucket for s in delivery.sent if s.part == "gather"]]
"""
)


@pytest.mark.parametrize(("size", "hybrid"), [(2, False), (4, True)])
def test_one_gather_a_bucket_and_the_next_is_under_way(size, hybrid):
    # by hand, in bf16 with pieces at multiples of 64 bytes: 128 of counts, 6336 of the embedding, 2176 of two layers fill
    # the first bucket of 16384; 48000 of the third layer's matrix take three; its bias and the fourth layer the last
    order = ["gather", "gather", "fill", "fill", "fill", "gather", "fill", "fill"]
    for wrong, events, buckets in run_ranks(GATHERS.replace("HYBRID", str(hybrid)), size=size):
        assert (wrong, events, buckets) == ([], order, [0, 1, 2, 3, 4])


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
