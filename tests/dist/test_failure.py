"""A rank that raises, dies, hangs or runs out of memory: the others stop, its own words are shown, nobody is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import list_checkpoints, load_checkpoint
from fastrl.dist.failure import Whereabouts, is_others_fault
from fastrl.errors import CheckpointError
from fastrl.run import run_training

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "models")]),
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def start(model, tmp_path, *more, resume=False):
    """`fastrl train` on two ranks, in a process of its own."""
    (tmp_path / "empty.yaml").write_text("{}\n")
    overrides = short_run(model, tmp_path, "parallel.processes=2", "run.checkpoint_every_steps=1", *more)
    command = [sys.executable, "-m", "fastrl", "train", str(tmp_path / "empty.yaml"), *overrides]
    return subprocess.Popen(
        [*command, "--resume"] if resume else command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def outcome(process, timeout=120):
    """(exit code, output, processes it leaves behind)."""
    family = set()
    end = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < end:
        family |= children_of(process.pid)
        time.sleep(0.2)
    output = process.communicate(timeout=10)[0].decode()
    gone, left = psutil.wait_procs(list(family), timeout=10)
    return process.returncode, output, [p.cmdline() for p in left]


def children_of(pid):
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


EXPECTED = {
    "raises": ["ValueError: broken on purpose", "rank 1 failed in phase update_actor of step 2", "Traceback"],
    "dies": ["rank 1 was ended by signal SIGKILL", "in phase update_actor of step 2"],
    "hangs": ["rank 1 did not take part: it was in phase update_actor of step 2", "in hangs"],
    "out_of_memory": [
        "out of memory in update_actor, step 2: CUDA out of memory. Tried to allocate 20.00 GiB.",
        "Set run.max_tokens_per_microbatch=",
        "(rank 1, phase update_actor of step 2)",
    ],
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_rank_that_fails(model, tmp_path, kind):
    started = time.monotonic()
    limit = "parallel.timeout_s=" + ("8" if kind == "hangs" else "60")
    process = start(model, tmp_path, f"algorithm.policy_loss=tiny_failures:{kind}", limit)
    code, output, left = outcome(process)
    assert code == 1 and not left, (code, left, output)
    for text in EXPECTED[kind]:
        assert text in output, output
    assert time.monotonic() - started < 100
    load_checkpoint(tmp_path / "run")
    assert [c.step for c in list_checkpoints(tmp_path / "run" / "checkpoints")] == [1]


def test_sigterm_saves_and_resume_goes_on(model, tmp_path):
    process = start(model, tmp_path, "algorithm.policy_loss=tiny_failures:slow", "optim.total_steps=40")
    wait_for(tmp_path / "run" / "checkpoints" / "step_000001", process)
    process.terminate()
    code, output, left = outcome(process)
    assert code == 143 and not left, (code, output, left)
    assert "is saved, --resume continues" in output and "Traceback" not in output
    step = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].step
    again = start(model, tmp_path, f"optim.total_steps={step + 1}", resume=True)
    code, output, left = outcome(again)
    assert code == 0 and not left, output
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].step == step + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_launcher_ends_the_ranks(model, tmp_path, number):
    process = start(model, tmp_path, "algorithm.policy_loss=tiny_failures:slow", "optim.total_steps=400")
    wait_for(tmp_path / "run" / "checkpoints" / "step_000001", process)
    family = children_of(process.pid)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert len(family) >= 2 and not psutil.wait_procs(list(family), timeout=15)[1]
    load_checkpoint(tmp_path / "run")


def wait_for(path, process, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_whose_fault_an_error_is():
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    wrapped = CheckpointError("could not save")
    wrapped.__cause__ = lost
    assert is_others_fault(lost) and is_others_fault(wrapped)
    assert not is_others_fault(ValueError("connection closed by peer")) and not is_others_fault(RuntimeError("NaN"))
    failure = Whereabouts().report(ValueError("x"))
    assert (failure.rank, failure.exit_code, failure.caused_by_others) == (0, 1, False)
    assert failure.error().exit_code == 1 and "ValueError: x" in str(failure.error())


def test_a_checkpoint_of_another_model(model, tmp_path):
    run_training(load_config([], short_run(model, tmp_path, "optim.total_steps=1")))
    other = write_tiny_folder(tmp_path / "other", name="qwen3")
    overrides = short_run(other, tmp_path, "optim.total_steps=2", "parallel.processes=2")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        run_training(load_config([], overrides), resume="auto")
