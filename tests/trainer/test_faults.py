"""What a user can get wrong while a run is on: rewards that misbehave, a full disk, Ctrl-C in each phase."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import list_checkpoints, load_checkpoint
from fastrl.errors import FastRLError, RewardError
from fastrl.run import run_training
from fastrl.trainer.run_folder import sole_user

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "models")]),
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def train(overrides):
    return run_training(load_config([], overrides))


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reward(name, *more):
    return [f"reward.functions=[python:tiny_rewards:{name}]", *more]


@pytest.mark.parametrize("name", ["raises", "nothing", "nan", "text"])
def test_a_reward_that_scores_nobody_stops_the_run(model, tmp_path, name):
    with pytest.raises(RewardError) as caught:
        train(short_run(model, tmp_path, *reward(name)))
    cause = {"raises": "raises: ValueError: broken on purpose", "nan": "nan: returned nan", "text": "the text 'good'"}
    summary = "abstained from all of them" if name == "nothing" else "16 of 16 samples could not be scored"
    assert summary in str(caught.value)
    assert cause.get(name, "") in str(caught.value)


def test_a_reward_that_hangs_is_killed_and_named(model, tmp_path):
    started = time.monotonic()
    with pytest.raises(RewardError, match="hangs"):
        train(short_run(model, tmp_path, *reward("hangs", "reward.timeout_s=0.5", "rollout.num_prompts_per_step=1")))
    assert time.monotonic() - started < 60


def test_a_reward_that_fails_sometimes_is_counted_and_excluded(model, tmp_path):
    run = train(short_run(model, tmp_path, *reward("raises_sometimes", "reward.max_failure_fraction=0.9")))
    rows = metrics_of(run)
    assert len(rows) == 4 and sum(row["reward/unscorable"] for row in rows) > 0
    assert all(row["perf/nan_values"] == 0 for row in rows)


def test_equal_rewards_teach_nothing_and_say_so(model, tmp_path):
    run = train(short_run(model, tmp_path, *reward("constant")))
    rows = metrics_of(run)
    assert all(row["reward/zero_variance_fraction"] == 1 and row["optim/grad_norm"] == 0 for row in rows)
    assert "all 16 rewards are 1" in (run / "log.txt").read_text()


def test_one_sample_per_prompt_with_grpo_is_warned_about(model, tmp_path):
    loaded = load_config([], short_run(model, tmp_path, "rollout.num_samples_per_prompt=1", "optim.total_steps=1"))
    assert any("compares samples of one prompt" in warning for warning in loaded.warnings)
    row = metrics_of(run_training(loaded))[-1]
    assert row["reward/group_of_one"] == 4 and row["policy/advantage/mean"] == 0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["model.path=/nowhere/at/all"], "model.path = /nowhere/at/all: no such folder"),
        (["run.device=cuda:0"], "run.device"),
        (["data.apply_chat_template=true"], "chat template"),
        (["data.prompt_column=question"], "data.prompt_column"),
    ],
)
def test_wrong_inputs_name_the_key(model, tmp_path, overrides, expected):
    with pytest.raises(FastRLError) as caught:
        train(short_run(model, tmp_path, *overrides))
    assert expected in str(caught.value) and caught.value.exit_code == 2


def test_an_empty_dataset(model, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    overrides = [o for o in short_run(model, tmp_path) if not o.startswith("data.")]
    with pytest.raises(FastRLError, match=r"data\.train = .*empty\.jsonl"):
        train([*overrides, f"data.train={tmp_path / 'empty.jsonl'}"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.policy_loss=tiny_plugins:mean_loss"],
            "its loss has shape [] instead of [",
        ),
        (["algorithm.policy_loss=tiny_plugins:no_token_loss"], "returned a Tensor instead of a TokenLoss"),
        (["algorithm.advantage=tiny_plugins:mean_advantage"], "returned shape [] instead of a tensor of shape [16]"),
        (["algorithm.advantage=tiny_plugins:one_of_two"], "returned a Tensor instead of (advantages, returns)"),
    ],
)
def test_plug_ins_are_never_broadcast(model, tmp_path, overrides, expected):
    with pytest.raises(FastRLError) as caught:
        train(short_run(model, tmp_path, *overrides))
    assert expected in str(caught.value)


def test_a_loss_that_takes_the_reference_gets_it(model, tmp_path):
    """log_prob - ref_log_prob is 0 in the first step, where the policy still is the reference."""
    options = ["algorithm.policy_loss=tiny_plugins:far_from_reference", "optim.total_steps=2", "optim.lr=0.1"]
    first, second = metrics_of(train(short_run(model, tmp_path, *options)))
    assert abs(first["policy/stat/distance"]) < 1e-6 < abs(second["policy/stat/distance"])


def test_prompts_that_leave_no_room_are_found_before_training(model, tmp_path):
    with pytest.raises(FastRLError, match=r"data.train: a prompt of \d+ tokens and a response of up to 4000 exceed"):
        train(short_run(model, tmp_path, "rollout.max_response_tokens=4000"))
    with pytest.raises(FastRLError, match=r"rollout.stop_token_ids has 999999, but the model's ids are below"):
        train(short_run(model, tmp_path, "rollout.stop_token_ids=[999999]"))
    assert not (tmp_path / "run").exists()


def test_damaged_weights(model, tmp_path):
    folder = Path(write_tiny_folder(tmp_path / "cut"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(FastRLError, match=r"model.path = .*cut: "):
        train(short_run(str(folder), tmp_path))


def test_a_failed_start_leaves_other_files_alone(model, tmp_path):
    """A folder that holds anything is refused, and nothing in it is written over or removed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("mine")
    with pytest.raises(FastRLError, match="run already holds files; remove the folder, or choose another"):
        train(short_run(model, tmp_path, "data.prompt_column=question"))
    assert (tmp_path / "run" / "config.yaml").read_text() == "mine"


def test_a_run_without_a_checkpoint_says_what_to_do(model, tmp_path):
    with pytest.raises(FastRLError, match="lower the policy's learning rate"):
        train(short_run(model, tmp_path, "algorithm.policy_loss=tiny_plugins:not_a_number"))
    with pytest.raises(FastRLError, match="already holds a run that saved no checkpoint; remove the folder"):
        train(short_run(model, tmp_path))
    with pytest.raises(FastRLError, match=r"the run there saved none .*: remove the folder and start without --resume"):
        run_training(load_config([], short_run(model, tmp_path)), resume="auto")


def test_a_run_folder_that_cannot_be_made(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FastRLError, match=r"run.dir = .*file: cannot make .*file/run \(Not a directory\)"):
        train(short_run(model, tmp_path / "file"))


def test_two_processes_never_share_a_run_folder(model, tmp_path):
    run = train(short_run(model, tmp_path, "optim.total_steps=1"))
    again = load_config([], short_run(model, tmp_path, "optim.total_steps=2"))
    with sole_user(run), pytest.raises(FastRLError, match="is in use by another process"):
        run_training(again, resume="auto")
    run_training(again, resume="auto")
    assert [row["step"] for row in metrics_of(run)] == [1, 2]


def test_a_model_folder_without_a_tokenizer(model, tmp_path):
    folder = Path(write_tiny_folder(tmp_path / "bare"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(FastRLError, match="tokenizer"):
        train(short_run(str(folder), tmp_path))


def start(tmp_path, overrides, preexec=None):
    """`fastrl train` in a process of its own."""
    (tmp_path / "empty.yaml").write_text("{}\n")
    command = [sys.executable, "-m", "fastrl", "train", str(tmp_path / "empty.yaml"), *overrides]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=preexec
    )


def test_a_full_disk_leaves_the_last_checkpoint(model, tmp_path):
    small = 60_000  # bytes a file may have: enough for metrics, too few for the tensors of a later checkpoint
    run = train(short_run(model, tmp_path, "optim.total_steps=1"))
    before = list_checkpoints(run / "checkpoints")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))

    process = start(tmp_path, [*short_run(model, tmp_path, "optim.total_steps=3"), "--resume"], limit)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 1 and "checkpoint" in output and "Traceback" not in output, output
    assert [c.path for c in list_checkpoints(run / "checkpoints")] == [c.path for c in before]
    load_checkpoint(run)


PHASES = {
    "generate": ["rollout.max_response_tokens=80", "rollout.num_samples_per_prompt=4000"],
    "reward": [*reward("slow"), "rollout.num_samples_per_prompt=64"],
    "update": ["algorithm.num_epochs_per_batch=2000"],
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_stops_within_seconds(model, tmp_path, phase):
    """In each phase: exit code 130 within seconds, the checkpoint stays loadable, no process is left."""
    run = train(short_run(model, tmp_path, "optim.total_steps=1"))
    longer = PHASES[phase]
    process = start(tmp_path, [*short_run(model, tmp_path, "optim.total_steps=50", *longer), "--resume"])
    wait_until_running(run, process)
    time.sleep(1.0)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130, output
    assert time.monotonic() - asked < 15
    assert "Traceback" not in output and "--resume" in (run / "log.txt").read_text()
    load_checkpoint(run)


@pytest.mark.parametrize("room", [100, 3000])
def test_a_disk_that_is_full_from_the_start(model, tmp_path, room):
    """config.yaml or log.txt and metrics.jsonl do not fit: one message, no traceback."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    process = start(tmp_path, short_run(model, tmp_path / "runs", "optim.total_steps=9"), limit)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 1 and "Traceback" not in output, output
    assert "cannot write" in output and "File too large" in output and "ulimit -f" in output and "run.dir" in output


def wait_until_running(run, process, timeout_s=120):
    """Until the resumed run has said so in its log."""
    end = time.monotonic() + timeout_s
    while "resumed at step" not in (run / "log.txt").read_text():
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < end
        time.sleep(0.05)
