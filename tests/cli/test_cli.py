"""The command line as somebody uses it: exit codes, streams, arguments, and how quickly help appears."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from fastrl import __version__, cli
from fastrl.errors import ConfigError, EngineError

REPOSITORY = Path(cli.__file__).parents[1]
HELP_BOUND_S = 1.5  # 0.15 s on an idle core; the bound only has to notice that torch (2 s and more) was imported


def command(*arguments: str, cwd: Path | None = None, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "fastrl", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for the training loop: records what the command line asks for, and raises what it is told to."""
    loop = types.ModuleType("fastrl.run")
    loop.calls = []  # type: ignore[attr-defined]
    loop.error = None  # type: ignore[attr-defined]

    def record(loaded, **options):
        loop.calls.append((loaded.config, options))
        if loop.error is not None:
            raise loop.error

    loop.run_training = loop.run_evaluation = record  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastrl.run", loop)
    return loop


@pytest.fixture
def ppo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ppo.yaml").write_text("optim: {total_steps: 3}\n")
    return "ppo.yaml"


def test_help_is_quick_and_imports_no_torch():
    command("--help")  # byte-compiles
    started = time.perf_counter()
    result = command("--help")
    seconds = time.perf_counter() - started
    assert result.returncode == 0
    for name in ("train", "eval", "doctor", "config", "plot", "export", "rollouts"):
        assert f"\n  {name} " in result.stdout
    assert seconds < HELP_BOUND_S
    code = (
        "import sys; from fastrl import cli; cli.run(['train', '--help']); "
        "print([m for m in ('torch', 'transformers', 'pydantic_core', 'yaml') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = shown.stdout.splitlines()[-1]
    assert "torch" not in loaded
    assert "transformers" not in loaded


def test_idle_threads_sleep_before_torch_is_loaded():
    code = (
        "import os, sys; from fastrl import cli; cli.run = lambda words: print('torch' in sys.modules, "
        "os.environ['OMP_WAIT_POLICY']) or 0; cli.main([])"
    )
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | given
        shown = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
        )
        assert shown.stdout == f"False {expected}\n"


def test_version():
    assert command("--version").stdout == f"fastrl {__version__}\n"


def test_wrong_usage_exits_with_2(ppo, capsys, trainer):
    assert cli.run(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert cli.run(["train", "--dryrun", ppo]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert cli.run(["train"]) == 2
    assert capsys.readouterr().err == (
        "which configuration? give at least one YAML file, as in `fastrl train configs/ppo.yaml`\n"
    )
    assert cli.run(["train", "optim.lr=1"]) == 2
    assert trainer.calls == []


def test_config_errors_go_to_stderr_without_a_traceback(tmp_path):
    (tmp_path / "bad.yaml").write_text("algorithm:\n  clip_hi: 0.28\noptim: {total_steps: 3}\n")
    result = command("train", "bad.yaml", "--dry-run", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "bad.yaml:2:3: algorithm.clip_hi: unknown key; did you mean algorithm.clip_high?\n"
        "1 error in 1 file. `fastrl config --explain algorithm.clip_high` tells more.\n"
    )


def test_exit_codes_of_errors(ppo, capsys, trainer):
    for error, code in (
        (EngineError("engine gone"), 1),
        (ConfigError("no such column"), 2),
        (KeyboardInterrupt(), 130),
    ):
        trainer.error = error
        assert cli.run(["train", ppo]) == code
    assert capsys.readouterr().err == "engine gone\nno such column\ninterrupted\n"


def test_a_bug_shows_its_traceback(ppo, trainer):
    trainer.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        cli.run(["train", ppo])


def test_files_and_overrides_share_one_list(ppo, trainer):
    Path("more.yaml").write_text("run: {seed: 7}\n")
    Path("a=b.yaml").write_text("run: {name: equals}\n")
    assert cli.run(["train", ppo, "optim.lr=1e-4", "more.yaml", "--dry-run", "optim.eps=1e-7", "a=b.yaml"]) == 0
    config, options = trainer.calls[0]
    assert (config.optim.lr, config.optim.eps, config.run.seed, config.run.name) == (1e-4, 1e-7, 7, "equals")
    assert options == {"resume": None, "dry_run": True}


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [
        (["ppo.yaml"], None),
        (["ppo.yaml", "--resume"], "auto"),
        (["--resume", "ppo.yaml"], "auto"),
        (["ppo.yaml", "--resume", "run.seed=1"], "auto"),
        (["ppo.yaml", "--resume", "--dry-run"], "auto"),
        (["ppo.yaml", "--resume", "auto"], "auto"),
        (["ppo.yaml", "--resume=runs/x"], "runs/x"),
        (["--resume", "runs/x", "ppo.yaml"], "runs/x"),
        (["--resume", "a=b", "ppo.yaml"], "a=b"),
    ],
)
def test_resume_with_and_without_a_value(ppo, trainer, arguments, resume):
    Path("a=b").mkdir()
    assert cli.run(["train", *arguments]) == 0
    assert trainer.calls[0][1]["resume"] == resume


def test_eval_takes_a_configuration_or_a_run(ppo, trainer, capsys):
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text("optim: {total_steps: 3}\nrun: {seed: 9}\n")
    assert cli.run(["eval", ppo]) == 0
    assert cli.run(["eval", ppo, "--checkpoint", "runs/x"]) == 0
    assert cli.run(["eval", "x", "run.seed=8"]) == 0
    assert [options["checkpoint"] for _, options in trainer.calls] == [None, "runs/x", "runs/x"]
    assert trainer.calls[2][0].run.seed == 8
    Path("runs/y").mkdir()
    Path("runs/y/config.yaml").write_text("run: {seed: 1}\n")
    assert cli.run(["eval", "runs/x", "runs/y"]) == 2
    assert capsys.readouterr().err == "one run at a time: runs/x, runs/y\n"


def test_warnings_do_not_stop_and_are_shown_once(ppo, capsys, trainer):
    assert cli.run(["train", ppo, "algorithm.advantage=grpo", "--dry-run"]) == 0
    assert capsys.readouterr().err == (
        "warning: command line: rollout.num_samples_per_prompt = 1, but algorithm.advantage = grpo compares samples "
        "of one prompt: use 2 or more, or algorithm.advantage = reinforce_plus_plus\n"
    )
    assert cli.run(["train", ppo, "algorithm.advantage=grpo"]) == 0
    assert capsys.readouterr().err == "", "the run's own log shows them"
    assert len(trainer.calls) == 2


def test_config_command(ppo, capsys):
    assert cli.run(["config", "--explain", "optim.lr"]) == 0
    assert capsys.readouterr().out.startswith("optim.lr\n  peak learning rate of the policy\n")
    assert cli.run(["config", "--explain", "optim.lrr"]) == 2
    assert capsys.readouterr().err == "optim.lrr: no such key; did you mean optim.lr?\n"
    assert cli.run(["config", ppo, "optim.lr=2e-6"]) == 0
    assert "\n  lr: 2.0e-06\n" in capsys.readouterr().out
    assert cli.run(["config"]) == 0
    assert capsys.readouterr().out.startswith("Sections of a configuration:\n")


def test_the_printed_configuration_is_a_configuration(ppo, capsys, trainer):
    assert cli.run(["config", ppo]) == 0
    Path("all.yaml").write_text(capsys.readouterr().out)
    assert cli.run(["train", "all.yaml"]) == 0
    assert cli.run(["train", ppo]) == 0
    assert trainer.calls[0][0] == trainer.calls[1][0]


def test_run_folders_by_path_and_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/first").mkdir(parents=True)
    assert cli.run_folder("first") == Path("runs/first")
    assert cli.run_folder("runs/first") == Path("runs/first")
    with pytest.raises(ConfigError, match=r"frist: no such run folder, here or under runs/; did you mean first\?"):
        cli.run_folder("frist")


def test_a_closed_pipe_is_no_error():
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    result = subprocess.run(
        [sys.executable, "-m", "fastrl", "config", "--schema"],
        cwd=REPOSITORY,
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_ctrl_c_exits_with_130(tmp_path):
    (tmp_path / "fifo_reward.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    (tmp_path / "c.yaml").write_text(
        "optim: {total_steps: 1}\nreward: {functions: ['python:fifo_reward:score']}\n", encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastrl", "train", "c.yaml"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted\n"
