"""Checkpoints of several ranks: sharded tensors come back on another number of ranks, failures reach every rank."""

import sys
from pathlib import Path

import torch

from fastrl.dist.checkpoint import CheckpointManager, load_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from two_ranks import run_ranks

HELPERS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
from fastrl.dist.checkpoint import CheckpointManager, load_checkpoint
from fastrl.errors import CheckpointError
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(10.0).view(5, 2)
def sharded(t): return distribute_tensor(t, mesh, [Shard(0)])
"""

SAVE = (
    HELPERS
    + """
manager = CheckpointManager("{folder}", keep_last=2)
state = {{"model": {{"w": sharded(whole), "b": sharded(whole[:, 0].contiguous() * 3), "plain": torch.tensor([7.0])}},
         "step": torch.tensor(3.0)}}
path = manager.save(1, state, {{"who": "all", "rank_seen": size}})
return [str(path), [c.step for c in manager.list()]]
"""
)

LOAD = (
    HELPERS
    + """
templates = {{"model": {{"w": sharded(torch.zeros(5, 2)), "b": sharded(torch.zeros(5)), "plain": torch.zeros(1)}}}}
tensors, state = load_checkpoint("{folder}", templates)
return [tensors["model"]["w"].full_tensor().tolist(), tensors["model"]["b"].full_tensor().tolist(),
        tensors["model"]["plain"].tolist(), state]
"""
)


def check(w, b, plain, state, saved_on):
    assert torch.equal(torch.tensor(w), torch.arange(10.0).view(5, 2))
    assert b == [0.0, 6.0, 12.0, 18.0, 24.0]
    assert plain == [7.0]
    assert state == {"who": "all", "rank_seen": saved_on}


def test_two_ranks_to_one_and_to_three(tmp_path):
    saved = run_ranks(SAVE.format(folder=tmp_path))
    assert saved[0] == saved[1] == [str(tmp_path / "step_000001"), [1]]
    files = sorted(p.name for p in (tmp_path / "step_000001" / "tensors").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"], "each rank wrote its own shards"

    tensors, state = load_checkpoint(tmp_path)
    model = tensors["model"]
    check(model["w"].tolist(), model["b"].tolist(), model["plain"].tolist(), state, 2)
    assert tensors["step"].item() == 3.0

    results = run_ranks(LOAD.format(folder=tmp_path), size=3)
    assert results[0] == results[1] == results[2]
    check(*results[0], 2)


def test_one_rank_to_two(tmp_path):
    whole = torch.arange(10.0).view(5, 2)
    state = {"model": {"w": whole, "b": whole[:, 0] * 3, "plain": torch.tensor([7.0])}, "step": torch.tensor(3.0)}
    CheckpointManager(tmp_path).save(1, state, {"who": "all", "rank_seen": 1})
    first, second = run_ranks(LOAD.format(folder=tmp_path))
    assert first == second
    check(*first, 1)


FAILING = (
    HELPERS
    + """
import errno, time
manager = CheckpointManager("{folder}", keep_last=2)
state = {{"w": sharded(whole)}}
manager.save(1, state, {{"step": 1}})
from fastrl.dist import storage
import torch.distributed.checkpoint.filesystem as fs
found = []
real = fs.FileSystem.create_stream
def broken(self, path, mode):
    if rank == 1 and mode == "wb":
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(self, path, mode)
fs.FileSystem.create_stream = broken
try:
    manager.save(2, state, {{"step": 2}})
except CheckpointError as error:
    found.append(str(error))
fs.FileSystem.create_stream = real
def read_only(path, value): raise OSError(errno.EACCES, "Permission denied")
real_json, storage.write_json = storage.write_json, read_only if rank == 0 else storage.write_json
try:
    manager.save(2, state, {{"step": 2}})
except CheckpointError as error:
    found.append(str(error))
storage.write_json = real_json
manager.save(3, state, {{"step": 3}})
path = "{folder}/step_000003/tensors/__1_0.distcp"
if rank == 0:
    with open(path, "r+b") as file:
        file.truncate(100)
dist.barrier()
try:
    load_checkpoint("{folder}", {{"w": sharded(torch.zeros(5, 2))}})
except CheckpointError as error:
    found.append(str(error))
return [found, [c.step for c in manager.list()]]
"""
)


def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path):
    (first, steps), (second, other) = run_ranks(FAILING.format(folder=tmp_path))
    assert steps == other == [1, 3]
    for messages in (first, second):
        full, denied, damaged = messages
        assert "no room for a checkpoint" in full
        assert "step_000001 is intact" in full
        assert "Permission denied" in denied
        assert "tensors/__1_0.distcp has 100 bytes instead of" in damaged
        assert "step_000001: resume from that one" in damaged
    assert not list(tmp_path.glob(".tmp-*"))
