"""Weights from one process to another: every byte, under every name, whatever the buckets."""

import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastrl.dist.weight_checksum import checksum
from fastrl.dist.weight_plan import plan_buckets
from fastrl.dist.weight_sync import TensorSpec, WeightReceiver, WeightSender
from fastrl.errors import WeightError

sys.path.insert(0, str(Path(__file__).parent))
from engine_child import Child


class Policy(nn.Module):
    """Odd sizes, a tied head, a buffer that is saved and one that is not, an integer buffer, a scalar."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(131, 24)
        self.layers = nn.ModuleList(nn.Linear(24, n, bias=n != 7) for n in (7, 33, 1000))
        self.register_buffer("bias", torch.randn(5))
        self.register_buffer("counts", torch.arange(11))
        self.register_buffer("rotary", torch.randn(3), persistent=False)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(24, 131, bias=False)
        self.head.weight = self.embed.weight


NAMES = {  # by hand; the order is the model's
    "embed.weight": (131, 24),
    "layers.0.weight": (7, 24),
    "layers.1.weight": (33, 24),
    "layers.1.bias": (33,),
    "layers.2.weight": (1000, 24),
    "layers.2.bias": (1000,),
    "bias": (5,),
    "counts": (11,),
    "scale": (),
}


def take(address, token, expected, updates=1, **options):
    """An engine that copies what comes: [{name: tensor}], [checksums] per update."""
    receiver = WeightReceiver(address, token, timeout_s=20, **options)
    taken, sums = [], []
    for _ in range(updates):
        receiver.check_manifest(expected)
        taken.append({name: tensor.clone() for name, tensor in receiver.tensors()})
        sums.append(dict(receiver.checksums))
    receiver.close()
    return taken, sums


class Wrapped(nn.Module):
    """A module without a tied head."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def expected_of(model, dtype, tied=True):
    specs = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    if not tied and "head.weight" in specs:
        del specs["head.weight"]
    return [TensorSpec(n, s, dtype if d.is_floating_point else d) for n, (s, d) in specs.items()]


@pytest.mark.parametrize("bucket_bytes", [4096, 3 * 4096 + 5, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_arrives_under_every_name(tmp_path, bucket_bytes, dtype):
    model = Policy()
    with WeightSender(model, bucket_bytes=bucket_bytes, dtype=dtype, folder=tmp_path, timeout_s=20) as sender:
        assert {s.name: s.shape for s in sender.manifest()} == NAMES
        expected = expected_of(model, dtype)
        child = Child(lambda: take(sender.address, sender.token, expected, updates=2, tied=True))
        first = sender.send(1)
        before = {n: t.clone() for n, t in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        second = sender.send(2)
        taken, sums = child.result()
    assert list(tmp_path.iterdir()) == []  # the socket and its folder are gone
    for got, want in zip(taken, (before, model.state_dict())):
        assert set(got) == {*NAMES, "head.weight"}
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor.to(dtype) if tensor.is_floating_point() else tensor), name
    assert sums == [first.checksums, second.checksums]
    assert set(first.checksums) == set(NAMES)
    assert first.checksums["layers.2.weight"] != second.checksums["layers.2.weight"]
    assert first.checksums["counts"] == second.checksums["counts"]
    size = sum(math.prod(s) * (8 if n == "counts" else dtype.itemsize) for n, s in NAMES.items())
    assert first.bytes == second.bytes == size


def test_the_schedule_begins_anew_with_each_engine():
    model = nn.Linear(3, 2)
    specs = expected_of(Wrapped(model), None)
    with WeightSender(Wrapped(model), bucket_bytes=4096, verify="first", timeout_s=20) as sender:
        checked = []
        for _ in range(2):
            child = Child(lambda: take(sender.address, sender.token, specs, updates=2))
            checked += [bool(sender.send(version).checksums) for version in (1, 2)]
            child.result()
    assert checked == [True, False, True, False]


def test_tied_names_are_sent_only_when_asked_for():
    model = Policy()
    with WeightSender(model, bucket_bytes=1 << 20) as sender:
        child = Child(lambda: take(sender.address, sender.token, expected_of(model, None, tied=False)))
        sender.send(1)
        (got,), _ = child.result()
    assert set(got) == set(NAMES)


def test_a_wrong_manifest_is_refused_before_the_first_byte():
    model = Policy()
    wrong = [
        s if s.name != "layers.1.bias" else TensorSpec("layers.1.bias", (34,), torch.float32)
        for s in expected_of(model, torch.float32, tied=False)
    ]
    wrong = [s for s in wrong if s.name != "scale"] + [TensorSpec("norm", (2,), torch.float32)]

    def engine():
        receiver = WeightReceiver(sender.address, sender.token)
        with pytest.raises(WeightError) as error:
            receiver.check_manifest(wrong)
        with pytest.raises(WeightError, match="check_manifest"):
            next(receiver.tensors())
        # the line still works
        receiver.check_manifest(expected_of(model, torch.float32, tied=False))
        return str(error.value), len(list(receiver.tensors()))

    with WeightSender(model, bucket_bytes=1 << 20, timeout_s=20) as sender:
        child = Child(engine)
        with pytest.raises(WeightError, match="version 1 refused") as error:
            sender.send(1)
        sender.send(2)
        theirs, count = child.result()
    for text in ("norm is not sent", "scale is unknown to the engine", "[33] in the trainer and [34] in the engine"):
        assert text in str(error.value) and text in theirs
    assert count == len(NAMES)


def test_an_engine_that_cannot_load_says_why_and_a_new_one_takes_over():
    model = Policy()

    def broken():
        receiver = WeightReceiver(sender.address, sender.token)
        receiver.check_manifest(expected_of(model, None, tied=False))
        for name, _ in receiver.tensors():
            if name == "layers.1.weight":
                receiver.fail("out of memory in layers.1.weight")
                break

    with WeightSender(model, bucket_bytes=4096, timeout_s=20) as sender:
        child = Child(broken)
        with pytest.raises(WeightError, match="out of memory in layers.1.weight"):
            sender.send(1)
        child.result()
        child = Child(lambda: take(sender.address, sender.token, expected_of(model, None, tied=False)))
        sender.send(1)
        (got,), _ = child.result()
    assert torch.equal(got["layers.2.weight"], model.layers[2].weight)


def plain_checksum(data: bytes) -> int:
    """The formula of `checksum`, word by word in Python integers."""
    data += bytes(-len(data) % 8)
    k, total = 0x9E3779B97F4A7C15, 0
    for i, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        total += word * (2 * (i // 512) + k * (2 * (i % 512) + 1))
    return total % 2**64


@pytest.mark.parametrize("size", [0, 1, 8, 4095, 4096, 4097, 130 * 4096, 131 * 4096 + 77])
def test_checksums_are_the_formula_on_any_path(size):
    data = torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    want = plain_checksum(data.numpy().tobytes())
    assert checksum(data) == want
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]  # not aligned
    assert checksum(shifted) == want
    pieces = [checksum(part, 4096 * i) for i, part in enumerate(data.split(4096))]
    assert sum(pieces) % 2**64 == want


def test_the_checksum_shows_a_changed_bit_and_exchanged_words():
    data = torch.randint(0, 256, (20 * 4096,), dtype=torch.uint8)
    want = checksum(data)
    for at in (0, 4095, 4096, 81919):
        other = data.clone()
        other[at] ^= 1
        assert checksum(other) != want
    words = data.view(torch.int64).clone()
    words[[0, 600]] = words[[600, 0]]
    assert checksum(words.view(torch.uint8)) != want


def test_buckets_are_filled_in_order_and_large_tensors_are_split():
    f32, bf16 = torch.float32, torch.bfloat16
    specs = [
        TensorSpec("a", (100,), f32),
        TensorSpec("b", (3, 5), bf16),
        TensorSpec("t", (100,), f32, same_as="a"),
        TensorSpec("large", (5000,), bf16),
        TensorSpec("c", (), f32),
        TensorSpec("none", (0, 4), f32),
    ]
    # by hand: 400 bytes take 448; 30 bytes; 10000 bytes in buckets of 4096, 4096, 1808
    plan = [[(p.index, p.start, p.count, p.offset) for p in bucket] for bucket in plan_buckets(specs, 5000)]
    assert plan == [
        [(0, 0, 100, 0), (1, 0, 15, 448)],
        [(3, 0, 2048, 0)],
        [(3, 2048, 2048, 0)],
        [(3, 4096, 904, 0), (4, 0, 1, 1856), (5, 0, 0, 1920)],
    ]
    with pytest.raises(WeightError, match=r"bucket of 100 bytes.*rollout\.bucket_gib"):
        plan_buckets(specs, 100)
