"""Checkpoints: bit-exact round trips, refusals that name what is wrong, pruning, kills and full disks."""

import errno
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastrl.dist import storage
from fastrl.dist.checkpoint import CheckpointManager, find_checkpoint, list_checkpoints, load_checkpoint
from fastrl.errors import CheckpointError


def trained(dtype=torch.float32, seed=0, width=3):
    """A small model with tied weights and an AdamW state that has seen three updates."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Linear(4, width)).to(dtype)
    model.append(torch.nn.Linear(4, width).to(dtype))
    model[2].weight = model[1].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.95))
    for step in range(3):
        x = torch.randn(5, width, dtype=dtype)
        hidden = model[0](x)
        (model[1](hidden).square().sum() + model[2](hidden).sum() * step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(a, b):
    """Equal to the bit, types included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip_is_bit_exact(tmp_path, dtype):
    model, optimizer = trained(dtype)
    model[0].bias.data[0] = math.nan
    model[0].bias.data[1] = -0.0
    state = {
        "lr": 0.1 + 0.2,
        "nan": math.nan,
        "inf": -math.inf,
        "big": 2**70,
        "text": "ü",
        "none": None,
        "l": [1, True],
    }
    manager = CheckpointManager(tmp_path / "checkpoints")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before = {name: t.clone() for name, t in saved["model"].items()}
    path = manager.save(7, saved, state)
    assert path == tmp_path / "checkpoints" / "step_000007"

    other, _other_optimizer = trained(dtype, seed=1)
    fresh = torch.optim.AdamW(other.parameters(), lr=9.0)
    templates = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
    tensors, loaded = manager.load("auto", templates)
    assert same(loaded, state)
    assert list(loaded) == list(state)
    for name, tensor in before.items():
        got = other.state_dict()[name]  # loaded in place
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), f"{name}: bits differ"
    assert same(tensors["optimizer"], optimizer.state_dict())
    assert tensors["optimizer"]["state"][0]["step"].dtype == torch.float32
    assert tensors["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.95)
    fresh.load_state_dict(tensors["optimizer"])

    # Going on from the loaded state is the same training, to the bit.
    if dtype != torch.bfloat16:
        model[0].bias.data[0] = other[0].bias.data[0] = 0.5
        for m, o in ((model, optimizer), (other, fresh)):
            x = torch.linspace(-1, 1, 6, dtype=dtype).view(2, 3)
            m[1](m[0](x)).square().sum().backward()
            o.step()
        assert same(model.state_dict(), other.state_dict())


def test_a_filled_optimizer_is_loaded_in_place(tmp_path):
    _model, optimizer = trained()
    _other, other_optimizer = trained(seed=5)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"optimizer": optimizer.state_dict()}, {})
    moment = other_optimizer.state_dict()["state"][0]["exp_avg"]
    manager.load("auto", {"optimizer": other_optimizer.state_dict()})
    assert torch.equal(moment, optimizer.state_dict()["state"][0]["exp_avg"])


def test_tied_weights_are_written_once_and_may_come_back_untied(tmp_path):
    big = torch.arange(50_000, dtype=torch.float32)
    tied = CheckpointManager(tmp_path / "tied")
    tied.save(1, {"model": {"embed": big, "head": big, "view": big[:10]}}, {})
    assert tied.latest().num_bytes < 1.2 * big.nbytes
    embed, head = torch.zeros(50_000), torch.zeros(50_000)
    tensors, _ = tied.load("auto", {"model": {"embed": embed, "head": head, "view": torch.zeros(10)}})
    assert torch.equal(embed, big)
    assert torch.equal(head, big)
    assert torch.equal(tensors["model"]["view"], big[:10])
    alone, _ = load_checkpoint(tmp_path / "tied")
    assert torch.equal(alone["model"]["head"], big)


def test_only_the_named_parts_are_loaded(tmp_path):
    model, optimizer = trained()
    path = CheckpointManager(tmp_path).save(
        3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, {"a": 1}
    )
    tensors, state = load_checkpoint(path, {"model": {}})
    assert list(tensors) == ["model"]
    assert same(tensors["model"], dict(model.state_dict()))
    assert state == {"a": 1}
    with pytest.raises(CheckpointError, match="holds no critic"):
        load_checkpoint(path, {"critic": {}})


def test_empty_scalar_and_strided_tensors(tmp_path):
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "t": torch.arange(6.0).view(2, 3).t(),
        "i": {3: torch.tensor(2**60)},
    }
    tensors["same"] = torch.empty(0, 3)
    CheckpointManager(tmp_path).save(1, tensors, {})
    loaded, _ = load_checkpoint(tmp_path)
    assert same(loaded, tensors)


def test_values_that_would_change_are_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    for tensors, state, name in (
        ({"a": {"b": {1, 2}}}, {}, "a/b is a set"),
        ({"a": {(1, 2): 3}}, {}, r"key \(1, 2\)"),
        ({}, {"rng": torch.ones(2)}, "state.rng is a Tensor"),
        ({}, {"x": {1: 2}}, "state.x has the key 1"),
        ({}, {"x": [float, 2]}, r"state.x\[0\] is a type"),
        ({"a": {1: torch.ones(1), "1": torch.ones(1)}}, {}, "two entries.*a/1"),
    ):
        with pytest.raises(CheckpointError, match=name):
            manager.save(1, tensors, state)
    assert manager.list() == []
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused_by_name_and_left_untouched(tmp_path):
    model, _optimizer = trained()
    path = CheckpointManager(tmp_path).save(1, {"model": model.state_dict()}, {})
    wider, _ = trained(width=5)
    before = {k: v.clone() for k, v in wider.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"another model: model/0.weight is \[4, 3\] float32.*\[4, 5\] float32"):
        load_checkpoint(path, {"model": wider.state_dict()})
    assert same(before, dict(wider.state_dict()))
    with pytest.raises(CheckpointError, match=r"float32 in the checkpoint and \[4, 3\] float64 in this run"):
        load_checkpoint(path, {"model": trained(torch.float64)[0].state_dict()})
    deeper = {**model.state_dict(), "extra.weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"model/extra.weight is not in the checkpoint"):
        load_checkpoint(path, {"model": deeper})
    del deeper["extra.weight"], deeper["0.bias"]
    with pytest.raises(CheckpointError, match=r"model/0.bias is in the checkpoint but not in this run"):
        load_checkpoint(path, {"model": deeper})


def test_keep_last_and_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=True)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.3), (5, None)):
        manager.save(step, {"x": torch.tensor(step)}, {"step": step}, score=score)
    assert [c.step for c in manager.list()] == [2, 4, 5], "the two newest and the earliest of the best"
    assert manager.best().step == 2
    assert manager.best().score == 0.9
    assert manager.latest().step == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000004", "step_000005"]
    plain = CheckpointManager(tmp_path, keep_last=1)
    plain.save(6, {}, {})
    assert [c.step for c in plain.list()] == [6]


def test_going_back_in_time(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20):
        manager.save(step, {"x": torch.tensor(step)}, {"from": "first"})
    manager.save(15, {}, {"from": "second"})  # resumed from 10: 15 is newer than 20
    assert manager.latest().step == 15
    assert [c.step for c in manager.list()] == [20, 15]
    manager.save(20, {}, {"from": "second"})  # the older checkpoint of the same step gives way
    assert [c.step for c in manager.list()] == [15, 20]
    assert manager.load("auto")[1] == {"from": "second"}
    assert len(list(tmp_path.iterdir())) == 2


def two_checkpoints(folder):
    manager = CheckpointManager(folder, keep_last=5)
    for step in (1, 2):
        manager.save(step, {"model": trained(seed=step)[0].state_dict()}, {"step": step})
    return manager, folder / "step_000001", folder / "step_000002"


def damage(path: Path, how: str):
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[:-3])
    elif how == "flipped":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize(
    "name", ["tensors/__0_0.distcp", "tensors/.metadata", "state.json", "tree.json", "manifest.json"]
)
def test_damage_is_named_and_the_previous_checkpoint_offered(tmp_path, name, how):
    manager, first, second = two_checkpoints(tmp_path)
    damage(second / name, how)
    template = trained(seed=9)[0]
    before = {k: v.clone() for k, v in template.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(second, {"model": template.state_dict()})
    assert name in str(raised.value)
    assert f"{first}: resume from that one" in str(raised.value)
    assert same(before, dict(template.state_dict())), "nothing was loaded"
    _tensors, state = manager.load(first)
    assert state == {"step": 1}
    if name == "manifest.json":
        assert [c.step for c in manager.list()] == [1]


def test_missing_checkpoints_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        CheckpointManager(tmp_path / "none").load("auto")
    assert CheckpointManager(tmp_path / "none").latest() is None
    _, first, second = two_checkpoints(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*step_000003.*step_000002"):
        load_checkpoint(tmp_path / "checkpoints" / "step_000003")
    assert find_checkpoint(tmp_path) == second, "a run folder means its newest checkpoint"
    assert find_checkpoint(first) == first
    damage(second / "manifest.json", "truncated")
    assert find_checkpoint(tmp_path) == first


def test_a_newer_format_is_refused(tmp_path):
    _, _first, second = two_checkpoints(tmp_path)
    manifest = json.loads((second / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["format"] = 99
    (second / "manifest.json").write_text(json.dumps({**manifest, "sha256": storage._digest(manifest)}))
    with pytest.raises(CheckpointError, match=r"format 99.*upgrade fastrl"):
        load_checkpoint(second)


def test_the_index_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "owned"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"refused.*system"):
        storage.read_index(tmp_path)
    assert not (tmp_path / "owned").exists()


def child(function) -> int:
    """Runs `function` in a forked process and returns how it ended (-9: killed)."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_at_any_file_operation_leaves_a_loadable_checkpoint(tmp_path):
    """The saving process is killed at its k-th file operation, for every k, and the run goes on each time."""
    killed = 0
    for k in range(1, 200):
        folder = tmp_path / f"kill_{k}"
        manager = CheckpointManager(folder, keep_last=1)
        manager.save(1, {"x": torch.full((64,), 1.0)}, {"step": 1})

        def save(k=k, manager=manager, folder=folder):
            count = 0

            def hook(event, args):
                nonlocal count
                if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                    if str(folder) not in str(args[0]) and event == "open":
                        return
                    count += 1
                    if count == k:
                        os.kill(os.getpid(), signal.SIGKILL)

            real_fsync = os.fsync

            def fsync(handle):
                hook("os.mkdir", [folder])  # counts as an operation: before and after the data are on disk
                real_fsync(handle)

            os.fsync = fsync
            sys.addaudithook(hook)
            manager.save(2, {"x": torch.full((64,), 2.0)}, {"step": 2})

        code = child(save)
        assert code in (0, -signal.SIGKILL)
        tensors, state = manager.load("auto")
        assert state["step"] in (1, 2)
        assert torch.equal(tensors["x"], torch.full((64,), float(state["step"])))
        manager.save(3, {"x": torch.full((64,), 3.0)}, {"step": 3})
        assert [p.name for p in folder.iterdir()] == ["step_000003"], "leftovers are gone"
        if code == 0:
            assert state["step"] == 2
            break
        killed += 1
    assert killed >= 15
    assert code == 0


def test_sigkill_in_the_middle_of_writing(tmp_path):
    """A real SIGKILL from outside while tens of megabytes are being written."""
    manager = CheckpointManager(tmp_path, keep_last=3)
    manager.save(1, {"x": torch.ones(8)}, {"step": 1})
    source = (
        "import sys, torch\n"
        "from fastrl.dist.checkpoint import CheckpointManager\n"
        "x = torch.ones(12_000_000)\n"
        "m = CheckpointManager(sys.argv[1], keep_last=3)\n"
        "print('ready', flush=True)\n"
        "for step in range(2, 100):\n"
        "    m.save(step, {'x': x}, {'step': step})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    assert process.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 60
    big = 0
    while big < 10_000_000 and time.monotonic() < deadline:
        big = sum(p.stat().st_size for p in tmp_path.glob(".tmp-*/tensors/__0_0.distcp"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert big >= 10_000_000, "the kill came in the middle of the tensor file"
    leftovers = list(tmp_path.glob(".tmp-*"))
    assert leftovers
    _, state = manager.load("auto")
    assert state["step"] >= 1
    assert manager.clean() == [p.name for p in leftovers]
    assert not list(tmp_path.glob(".tmp-*"))


def test_no_room_is_found_before_writing(tmp_path, monkeypatch):
    manager, _, _second = two_checkpoints(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"needs 5048\d+ bytes .*1000 bytes .* free; .*step_000002 is intact"):
        manager.save(3, {"x": torch.ones(1_000_000)}, {})
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_file_size_limit_while_writing(tmp_path):
    manager, _, second = two_checkpoints(tmp_path)

    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        try:
            manager.save(3, {"x": torch.ones(1_000_000)}, {"step": 3})
        except CheckpointError as error:
            (tmp_path / "message").write_text(str(error))
            os._exit(7)

    assert child(save) == 7
    message = (tmp_path / "message").read_text()
    assert "needs 5048576 bytes" in message
    assert "a file would be larger than this process or file system allows" in message and "ulimit -f" in message
    assert "the disk is full" not in message and "Free some space" not in message
    assert str(tmp_path) in message
    assert f"{second} is intact" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["message", "step_000001", "step_000002"]
    assert manager.load("auto")[1] == {"step": 2}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_while_writing(tmp_path, monkeypatch):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        manager, _, second = two_checkpoints(tmp_path)
        # Another process fills the disk between the check and the write: the write itself must fail cleanly.
        monkeypatch.setattr(CheckpointManager, "_check_space", lambda self, needed: None)
        with pytest.raises(CheckpointError, match=rf"needs 5048576 bytes .*free; {second} is intact"):
            manager.save(3, {"x": torch.ones(1_000_000)}, {})
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002"]
        assert manager.load("auto")[1] == {"step": 2}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_ctrl_c_while_saving(tmp_path, monkeypatch):
    manager, _, _ = two_checkpoints(tmp_path)

    def interrupted(folder, table):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.save(3, {"x": torch.ones(2)}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_other_failures_keep_their_cause(tmp_path, monkeypatch):
    manager, _, _ = two_checkpoints(tmp_path)

    def failing(folder, table):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "write_tensors", failing)
    with pytest.raises(CheckpointError, match=r"could not save .*step_000003: OSError: .*Input/output error"):
        manager.save(3, {"x": torch.ones(2)}, {})


def test_listing_ignores_everything_else(tmp_path):
    two_checkpoints(tmp_path)
    (tmp_path / ".tmp-step_000009").mkdir()
    (tmp_path / "step_000003").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2]
    assert list_checkpoints(tmp_path / "nothing") == []
