"""The samples that `fastrl rollouts` shows, from a written run folder."""

from __future__ import annotations

import pytest

from fastrl import cli
from fastrl.rollout.records import RolloutRecord, RolloutWriter


def record(step: int, sample_id: int, score: float | None, **fields) -> RolloutRecord:
    return RolloutRecord(
        step=step,
        sample_id=sample_id,
        group_id=0,
        prompt="What is [bold]2+2[/bold]?",
        response=f"it is {sample_id} [/red]",
        score=score,
        finish_reason="stop",
        length=5,
        **fields,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = RolloutWriter("runs/first/rollouts")
    writer.write(1, [record(1, 0, 0.0)])
    writer.write(2, [record(2, 0, 0.5), record(2, 1, None), record(2, 2, -1.0), record(2, 3, 1.0, split="validation")])
    return "first"


def shown(capsys, *arguments: str) -> list[str]:
    assert cli.run(["rollouts", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_last_step_in_order(run, capsys):
    lines = shown(capsys, run)
    assert [line.split("it is ")[1].split()[0] for line in lines if "it is" in line] == ["0", "1", "2", "3"]
    assert lines[-1] == "4 of 4 samples of step 2"
    text = "\n".join(lines)
    assert "What is [bold]2+2[/bold]?" in text, "model output is never read as markup"
    assert "score unscorable" in text
    assert "score 0.5  5 tokens  stop" in text


def test_best_worst_limit_and_split(run, capsys):
    def ids(*options: str) -> list[str]:
        return [line.split("it is ")[1].split()[0] for line in shown(capsys, run, *options) if "it is" in line]

    assert ids("--sort", "best") == ["3", "0", "2", "1"]
    assert ids("--sort", "worst", "--limit", "2") == ["2", "0"]
    assert ids("--split", "validation") == ["3"]
    assert ids("--step", "1") == ["0"]


def test_what_cannot_be_shown(run, capsys):
    assert cli.run(["rollouts", run, "--step", "7"]) == 2
    assert "no rollouts of step 7" in capsys.readouterr().err
    assert cli.run(["rollouts", run, "--sort", "random"]) == 2
    assert capsys.readouterr().err == "--sort random: must be written, best or worst\n"
    assert cli.run(["rollouts", "second"]) == 2
    assert capsys.readouterr().err == "second: no such run folder, here or under runs/\n"
