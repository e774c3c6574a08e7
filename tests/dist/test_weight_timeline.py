"""Spans of both ends of an update: they cover every bucket, and the ends work at the same time."""

import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from fastrl.dist.weight_plan import TensorSpec, filled_bytes
from fastrl.dist.weight_sync import WeightReceiver, WeightSender
from fastrl.dist.weight_timeline import Span, Timeline, parts, spans_from_json

sys.path.insert(0, str(Path(__file__).parent))
from engine_child import Child

NAP_S = 0.03


def test_an_update_is_filled_and_loaded_at_the_same_time(monkeypatch):
    """Six buckets; filling and loading take 30 ms each: one after the other 360 ms, overlapping about 210."""
    from fastrl.dist import weight_buckets

    model = nn.ParameterList(torch.full((1024,), float(i)) for i in range(6))
    specs = [TensorSpec(str(i), (1024,), torch.float32) for i in range(6)]
    fill = weight_buckets.SharedMemorySend.fill

    def slow(self, *arguments):
        time.sleep(NAP_S)
        return fill(self, *arguments)

    def engine():
        receiver = WeightReceiver(sender.address, sender.token, timeout_s=30)
        receiver.check_manifest(specs)
        for _ in receiver.tensors():
            time.sleep(NAP_S)

    monkeypatch.setattr(weight_buckets.SharedMemorySend, "fill", slow)
    with WeightSender(model, bucket_bytes=4096, timeout_s=30) as sender:
        child = Child(engine)
        delivery = sender.send(1)
        child.result()
    sent = {(s.part, s.bucket): s for s in delivery.sent}
    received = {(s.part, s.bucket): s for s in delivery.received}
    for k in range(6):
        assert {("gather", k), ("pack", k), ("checksum", k), ("wait", k)} <= sent.keys()
        assert {("idle", k), ("load", k), ("checksum", k)} <= received.keys()
        assert sent["pack", k].seconds >= NAP_S and received["load", k].seconds >= NAP_S
        assert sent["pack", k].end <= received["load", k].start  # one clock, and no bucket is read before it is filled
    for k in range(5):  # the next bucket is being filled while this one is loaded
        assert sent["pack", k + 1].start < received["load", k].end
    for k in range(4):  # a slot is overwritten only after it was read
        assert received["load", k].end <= sent["pack", k + 2].start


def test_spans_inside_others_count_once(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    cpu = iter([0.0, 0.5, 1.5, 3.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    timeline = Timeline()
    with timeline.span("pack", 0), timeline.span("checksum", 0):
        pass
    timeline.add("pack", 0, 20.0, 22.0, 2.0, 1.0)
    # by hand: 10 s with 3 s of them inside; 3 s on a core with 1 s inside; then 2 s and 1 s more
    spans = spans_from_json(timeline.to_json())
    assert spans == [Span("checksum", 0, 1.0, 4.0, 3.0, 1.0), Span("pack", 0, 0.0, 22.0, 9.0, 3.0)]
    assert parts([*spans, Span("pack", 1, 0.0, 1.0, 1.0, 0.5)]) == {"checksum": (3.0, 1.0), "pack": (10.0, 3.5)}


@pytest.mark.parametrize(
    ("sizes_mib", "bucket_mib", "filled_mib"),
    [([1] * 513, 256, 65), ([1] * 3000, 256, 256), ([1] * 100, 256, 32), ([1] * 100, 16, 16), ([90, 9, 300], 256, 90)],
)
def test_large_buckets_are_filled_in_part(sizes_mib, bucket_mib, filled_mib):
    # by hand: an eighth of the update, at least 32 MiB and each tensor that fits a bucket, at most a bucket
    specs = [TensorSpec(str(i), (size << 18,), torch.float32) for i, size in enumerate(sizes_mib)]
    specs.append(TensorSpec("tied", (1 << 30,), torch.float32, same_as="0"))
    assert -(-filled_bytes(specs, bucket_mib << 20) // (1 << 20)) == filled_mib
