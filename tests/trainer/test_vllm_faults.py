"""Real vLLM when somebody is killed: it, while it loads weights, or the trainer, while it generates."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_external_engine import running
from test_vllm_engine import HERE, TOLERANCE, make, plain_model, program_environment
from tiny_folder import short_run
from vllm_models import write_vllm_folder

from fastrl.config.load import load_config
from fastrl.dist.weight_buckets import SharedMemorySend
from fastrl.dist.weight_sync import WeightSender
from fastrl.errors import EngineError
from fastrl.rollout.process_link import ProcessLink
from fastrl.run import run_training

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
SHARED_MEMORY = Path("/dev/shm")


def test_killed_in_the_middle_of_an_update_of_a_run(tmp_path, monkeypatch):
    """The fifth bucket of an update finds the engine dead: a new one gets the current weights, the step completes."""
    processes, updates, buckets = [], [], []
    start, send, fill = ProcessLink.start, WeightSender.send, SharedMemorySend.fill

    def starting(self):
        start(self)
        processes.append(self.process)

    def sending(self, version, **options):
        updates.append(version)
        buckets.clear()
        return send(self, version, **options)

    def filling(self, slot, *arguments):
        buckets.append(self.bucket_bytes)
        if len(updates) == 2 and len(buckets) == 5:
            os.kill(processes[-1].pid, signal.SIGKILL)
            processes[-1].wait()
        return fill(self, slot, *arguments)

    monkeypatch.setattr(ProcessLink, "start", starting)
    monkeypatch.setattr(WeightSender, "send", sending)
    monkeypatch.setattr(SharedMemorySend, "fill", filling)
    folder = write_vllm_folder(tmp_path / "model", "llama", tied=True)
    ten_kb = 10240 / 2**30  # GiB, less than a projection of 128 x 128 numbers: tensors are split
    options = ["rollout.engine=vllm", "optim.total_steps=3", f"rollout.bucket_gib={ten_kb}"]
    result = run_training(load_config([], [*short_run(folder, tmp_path / "runs"), *options]))
    lines = [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()]
    assert len(processes) == 2 and len(buckets) > 20
    assert updates == [0, 1, 1, 2, 3]  # the first weights, and one after each of three steps
    assert sum(line["rollout/engine_restarts"] for line in lines) == 1
    assert [line["rollout/policy_version"] for line in lines] == [0, 1, 2]
    assert all(line["mismatch/max"] <= TOLERANCE for line in lines)


@pytest.mark.parametrize("overrides", [[], ["rollout.zero_copy=true"]], ids=["buckets", "zero_copy"])
def test_killed_trainer_leaves_nothing(tmp_path, overrides):
    """No engine, no process that it had started, no socket, no shared memory by name."""
    before = set(SHARED_MEMORY.iterdir())
    trainer = subprocess.Popen(
        [sys.executable, str(HERE / "vllm_orphan.py"), str(tmp_path), *overrides],
        env=program_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    words = next((line.split() for line in trainer.stdout if line.startswith("RUNNING ")), None)
    assert words is not None
    engine, address = int(words[1]), Path(words[2])
    assert running(engine) and address.exists()
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 60  # a loaded machine takes its time to reap a process
    while time.monotonic() < deadline and (left_of(engine) or address.parent.exists()):
        time.sleep(0.05)
    assert left_of(engine) == [] and not address.parent.exists()
    assert set(SHARED_MEMORY.iterdir()) - before == set()


def left_of(session: int) -> list[int]:
    """Living processes of the session that an engine process leads."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue  # it has ended meanwhile
        if int(sid) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_an_unknown_architecture_names_the_key(tmp_path):
    folder = write_vllm_folder(tmp_path / "model", "llama", tied=True)
    model = plain_model(folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["NobodyForCausalLM"]}))
    engine = make(folder, model)
    try:
        with pytest.raises(EngineError, match=r"model\.path = .*rollout\.engine=native"):
            engine.ready()
    finally:
        engine.close()


def test_an_untested_version_is_named():
    program = (
        "import json, vllm\n"
        "from fastrl.rollout.vllm import start\n"
        "tested = start.version_warnings()\n"
        "start.TESTED_VERSION = '9.9'\n"
        "print(json.dumps([tested, start.version_warnings(), vllm.__version__]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=program_environment(), capture_output=True, text=True, timeout=200, check=True)
    tested, untested, version = json.loads(done.stdout.splitlines()[-1])
    assert tested == []
    assert untested == [f"vLLM {version} is installed, fastrl is tested with 9.9.x"]
