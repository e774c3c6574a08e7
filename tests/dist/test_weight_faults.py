"""What goes wrong during a delivery: either side killed, an engine that hangs, no memory, long paths, lost
acknowledgements. Nothing waits for ever and nothing is left behind."""

import os
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from fastrl.dist import weight_buckets, weight_wire
from fastrl.dist.weight_sync import TensorSpec, WeightReceiver, WeightSender
from fastrl.errors import WeightError

sys.path.insert(0, str(Path(__file__).parent))
from engine_child import Child


def model_of(rows=64, tensors=12, seed=0):
    torch.manual_seed(seed)
    return nn.ParameterDict({f"w{i:02d}": torch.randn(rows, 32) for i in range(tensors)})


def specs_of(model):
    return [TensorSpec(name, tuple(p.shape), torch.float32) for name, p in model.items()]


def receiver_of(sender, **options):
    return WeightReceiver(sender.address, sender.token, timeout_s=20, **options)


def open_memory():
    """Anonymous shared memory that this process holds open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sum("memfd:fastrl-weights" in link for link in found)


def test_engine_killed_in_the_middle_of_an_update_is_named_at_once_and_replaced(tmp_path):
    model = model_of()

    def killed():
        receiver = receiver_of(sender)
        receiver.check_manifest(specs_of(model))
        for name, _ in receiver.tensors():
            if name == "w05":
                os.kill(os.getpid(), 9)

    def healthy():
        receiver = receiver_of(sender)
        receiver.check_manifest(specs_of(model))
        return {name: tensor.clone() for name, tensor in receiver.tensors()}

    before = set(os.listdir("/dev/shm"))
    with WeightSender(model, bucket_bytes=8192, folder=tmp_path, timeout_s=30) as sender:
        child = Child(killed)
        started = time.monotonic()
        with pytest.raises(WeightError, match="the engine process ended during the update to version 7"):
            sender.send(7)
        assert time.monotonic() - started < 10  # not the time-out
        child.wait()
        child = Child(healthy)
        sender.send(7)
        got = child.result()
    assert all(torch.equal(got[name], p) for name, p in model.items())
    assert list(tmp_path.iterdir()) == [] and set(os.listdir("/dev/shm")) == before and open_memory() == 0


def test_engine_restarted_between_updates_is_found_by_the_next_send():
    model = model_of(tensors=3)

    def once():
        receiver = receiver_of(sender)
        receiver.check_manifest(specs_of(model))
        return {name: tensor.clone() for name, tensor in receiver.tensors()}

    with WeightSender(model, bucket_bytes=8192, timeout_s=20) as sender:
        for version in (1, 2):
            child = Child(once)
            sender.send(version)
            got = child.result()  # and has ended
            assert all(torch.equal(got[name], p) for name, p in model.items())


def test_trainer_killed_in_the_middle_leaves_neither_socket_nor_memory_nor_a_waiting_engine(tmp_path):
    model = model_of()
    ready = tmp_path / "ready"

    def trainer():
        sender = WeightSender(model, bucket_bytes=8192, folder=tmp_path, timeout_s=30)
        ready.with_suffix(".part").write_text(f"{sender.address}\n{sender.token}")
        ready.with_suffix(".part").rename(ready)
        sender.send(1)

    killed = Child(trainer)
    while not ready.exists():
        time.sleep(0.01)
    address, token = ready.read_text().split()
    receiver = WeightReceiver(address, token, timeout_s=20)
    receiver.check_manifest(specs_of(model))
    stream = receiver.tensors()
    next(stream)
    killed.kill()
    started = time.monotonic()
    with pytest.raises(WeightError, match="the trainer is gone"):
        for _ in stream:
            pass
    assert time.monotonic() - started < 10
    receiver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def test_folders_of_killed_trainers_are_swept_and_those_of_living_ones_are_not(tmp_path):
    killed = Child(lambda: [weight_wire.Door(tmp_path), time.sleep(60)])
    while not list(tmp_path.glob("*/line")):
        time.sleep(0.01)
    alive = weight_wire.Door(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    killed.kill()
    other = weight_wire.Door(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.folder.name, other.folder.name}
    for door in (alive, other):
        assert oct(door.folder.stat().st_mode & 0o777) == "0o700"
        door.close()


def test_an_engine_that_hangs_ends_the_update_after_the_time_out():
    model = model_of()

    def hangs():
        receiver = receiver_of(sender)
        receiver.check_manifest(specs_of(model))
        stream = receiver.tensors()
        next(stream)
        time.sleep(60)
        next(stream)

    with WeightSender(model, bucket_bytes=8192, timeout_s=1.0) as sender:
        child = Child(hangs)
        with pytest.raises(WeightError, match="did not answer in time"):
            sender.send(1)
        child.kill()


def test_without_an_engine_the_wait_ends_with_the_address():
    with WeightSender(model_of(), timeout_s=0.3) as sender:
        with pytest.raises(WeightError, match="did not connect to .*line within 0.3 s"):
            sender.send(1)
        with pytest.raises(WeightError):
            WeightReceiver(sender.address + "x", sender.token)


def test_a_peer_without_the_token_is_turned_away():
    model = model_of(tensors=2)

    def engine():
        stranger = WeightReceiver(sender.address, "0" * 32, timeout_s=20)
        honest = receiver_of(sender)
        with pytest.raises(WeightError, match="token"):
            stranger.begin(timeout_s=20)
        honest.check_manifest(specs_of(model))
        return len(list(honest.tensors()))

    with WeightSender(model, bucket_bytes=8192, timeout_s=20) as sender:
        child = Child(engine)
        sender.send(1)
        assert child.result() == 2


def test_a_socket_path_that_is_too_long_is_reached_through_its_folder(tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    model = model_of(tensors=2)

    def engine():
        receiver = receiver_of(sender)
        receiver.check_manifest(specs_of(model))
        return len(list(receiver.tensors()))

    with WeightSender(model, bucket_bytes=8192, folder=deep, timeout_s=20) as sender:
        assert len(sender.address) > 108
        child = Child(engine)
        sender.send(1)
        assert child.result() == 2
    assert list(deep.iterdir()) == []


def test_no_room_for_the_buckets_names_the_key_on_both_sides():
    model = model_of(tensors=2)

    def engine():
        receiver = receiver_of(sender)
        with pytest.raises(WeightError, match="the trainer is gone"):
            receiver.begin(timeout_s=20)

    def trainer():
        # the kernel's own limit on file sizes holds for shared memory
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(WeightError, match=r"no room for 0\.00391 GiB of shared memory.*rollout\.bucket_gib"):
            sender.send(1)
        assert open_memory() == 0

    with WeightSender(model, bucket_bytes=4 << 20, timeout_s=20) as sender:
        child, other = Child(engine), Child(trainer)
        other.result()
        child.kill()


def test_a_lost_acknowledgement_is_seen_as_other_bytes_and_names_the_tensor(monkeypatch):
    """The check of the check: without waiting for the engine, buckets are overwritten while it reads."""
    model = model_of()

    def slow():
        receiver = receiver_of(sender)
        receiver.check_manifest(specs_of(model))
        wrong = []
        for name, tensor in receiver.tensors():
            time.sleep(0.05)
            if not torch.equal(tensor, model[name]):
                wrong.append(name)
        return wrong

    def impatient(self, line, update, number):
        self.buckets.freed(number % 2)

    with WeightSender(model, bucket_bytes=8192, timeout_s=20) as sender:
        child = Child(slow)
        sender.send(1)  # unchanged: every byte is right
        assert child.result() == []

    monkeypatch.setattr(WeightSender, "_wait_free", impatient)
    monkeypatch.setattr(WeightSender, "_answer", ignoring_acknowledgements(WeightSender._answer))
    with WeightSender(model, bucket_bytes=8192, timeout_s=20) as sender:
        child = Child(slow)
        with pytest.raises(WeightError, match="received other bytes than were sent for w0"):
            sender.send(1)
        kind, text = child.outcome()
    assert kind == "error" and "received other bytes than were sent for w0" in text


def ignoring_acknowledgements(answer):
    def wrapped(self, line, kinds):
        return answer(self, skipping(line), kinds)

    class skipping:
        def __init__(self, line):
            self.line = line

        def receive(self, timeout_s):
            while (message := self.line.receive(timeout_s))["kind"] == "free":
                pass
            return message

    return wrapped


def test_a_changed_byte_on_the_way_names_the_tensor(monkeypatch):
    model = model_of(tensors=4)
    fill = weight_buckets.SharedMemorySend.fill

    def flipping(self, slot, parts, seen=None):
        room = fill(self, slot, parts, seen)
        room[8192 + 5] ^= 1  # the second tensor of the bucket, behind the sender's back
        return room

    def engine():
        receiver = receiver_of(sender)
        receiver.check_manifest(specs_of(model))
        return [name for name, _ in receiver.tensors()]

    monkeypatch.setattr(weight_buckets.SharedMemorySend, "fill", flipping)
    with WeightSender(model, bucket_bytes=1 << 20, timeout_s=20) as sender:
        child = Child(engine)
        with pytest.raises(WeightError, match="received other bytes than were sent for w01$"):
            sender.send(1)
        child.wait()
        child = Child(engine)
        delivery = sender.send(2, verify=False)  # unchecked: it passes
        assert child.result() == list(model) and delivery.checksums == {}
