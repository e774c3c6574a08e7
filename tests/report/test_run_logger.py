"""The run logger: files, lines, resuming, failures, other ranks; and the screens it speaks through."""

import io
import json
import logging
import re
import warnings

import pytest
from rich.console import Console

from fastrl.report.console import LiveScreen, PlainScreen, QuietScreen, make_screen
from fastrl.report.metrics_file import read_metrics
from fastrl.report.run_logger import RunLogger
from fastrl.rollout.records import RolloutRecord, RolloutWriter, step_files


def logger(folder, **options):
    options.setdefault("console", "plain")
    options.setdefault("stream", io.StringIO())
    return RunLogger(folder, total_steps=10, **options)


def log_text(folder):
    """log.txt without the times of day."""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", (folder / "log.txt").read_text(), flags=re.M)


def test_a_run_writes_its_files(tmp_path):
    stream = io.StringIO()
    with logger(tmp_path / "run", stream=stream) as log:
        log.plan(["generate  4 x 8", "reward    math"])
        log.phase("generate")
        log.progress("generate", 3, 8)
        log.info("saved step_000001")
        log.log(1, {"reward/mean": 0.25})
        log.log(2, {"reward/mean": 0.75, "rollout/truncated_fraction": 0.5})
        log.log(3, {"reward/mean": 0.75})
    shown = stream.getvalue().splitlines()
    assert shown[0].startswith("fastrl  ")
    assert shown[1:5] == [
        "  generate  4 x 8",
        "  reward    math",
        "saved step_000001",
        "step  1/10  reward 0.250  eta 0s",
    ]
    assert shown[5] == "step  2/10  reward 0.750 (+0.500)  cut 50%  eta 0s".replace("  cut 50%", "")
    assert shown[6].startswith("health 50% of responses were cut")
    assert shown[7] == "step  3/10  reward 0.750 (+0.250)  eta 0s", "against the mean of the steps before"
    assert shown[8].startswith("finished after 0s")
    assert log_text(tmp_path / "run").splitlines() == shown, "log.txt has everything that was printed"
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["reward/mean"] == 0.25
    assert rows[0]["time/total_s"] >= 0


def test_resume_goes_on_in_the_same_files(tmp_path):
    with logger(tmp_path) as log:
        for step in range(4):
            log.log(step, {"reward/mean": float(step)})
            record = RolloutRecord(step, 0, 0, "p", "r", 1.0, "stop", 1)
            RolloutWriter(tmp_path / "rollouts").write(step, [record])
        log._seconds_before = 100.0
        saved = json.loads(json.dumps(log.state_dict()))
    with logger(tmp_path, resumed_step=1, saved=saved) as log:
        assert 100 <= log.seconds() < 130
        log.log(2, {"reward/mean": 20.0})
    assert "step  2/10  reward 20.000 (+19.500)" in log_text(tmp_path), "the trend goes on from the steps kept"
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert list(step_files(tmp_path / "rollouts")) == [0, 1]
    assert log_text(tmp_path).count("finished after") == 2, "log.txt is kept"


def test_warnings_of_libraries_reach_the_log_once(tmp_path, monkeypatch):
    stream = io.StringIO()
    shown = warnings.showwarning
    with logger(tmp_path, stream=stream) as log:
        for _ in range(3):
            logging.getLogger("some.library").warning("odd %s", "thing")
            warnings.warn("old call", FutureWarning, stacklevel=1)
        logging.getLogger("some.library").info("not this")
        monkeypatch.setattr(logging, "raiseExceptions", False)
        log._capture.emit(logging.LogRecord("lib", logging.WARNING, "f.py", 1, "bad format %d", ("x",), None))
    assert warnings.showwarning is shown, "put back"
    lines = [line for line in log_text(tmp_path).splitlines() if line.startswith("warning")]
    assert lines[0] == "warning odd thing"
    assert re.match(r"warning FutureWarning: old call \(.*test_run_logger.py:\d+\)", lines[1])
    assert len(lines) == 2
    assert "warning odd thing" in stream.getvalue()
    logging.getLogger("some.library").warning("after the run")
    assert "after the run" not in log_text(tmp_path)


def test_a_failure_is_in_the_log(tmp_path):
    with pytest.raises(ZeroDivisionError), logger(tmp_path) as log:
        log.plan([])
        _ = 1 / 0
    text = log_text(tmp_path)
    assert "ZeroDivisionError" in text
    assert "test_run_logger.py" in text
    assert "failed after" in text
    with pytest.raises(KeyboardInterrupt), logger(tmp_path / "b"):
        raise KeyboardInterrupt
    assert "interrupted after" in log_text(tmp_path / "b")
    assert "Traceback" not in log_text(tmp_path / "b")


def test_other_ranks_write_warnings_only(tmp_path):
    stream = io.StringIO()
    with logger(tmp_path, is_main=False, stream=stream) as log:
        log.plan(["x"])
        log.log(1, {"reward/mean": 1.0})
        log.phase("generate")
        log.progress("generate", 1, 2)
        logging.getLogger("lib").warning("from rank 1")
    assert stream.getvalue() == ""
    assert not (tmp_path / "metrics.jsonl").exists()
    assert log_text(tmp_path) == "[rank 0] warning from rank 1\n", "marked with the rank it comes from"


def test_closing_twice_and_eta(tmp_path):
    log = logger(tmp_path)
    log.plan([])
    log._times[0] = (-1, log._times[0][1] - 8.0)  # the plan was printed 8 s ago
    log.log(2, {})  # resumed at step 1: one step took 8 s, 8 are left
    assert "eta 1m04s" in log_text(tmp_path)
    log.total_steps = 4
    log.log(3, {})
    assert "step 3/4" in log_text(tmp_path)
    log.close()
    log.close()
    log.info("late words do not fail")


def test_validation_before_training_does_not_count_as_a_step(tmp_path):
    log = logger(tmp_path)
    log.plan([])
    log._times[0] = (-1, log._times[0][1] - 100.0)
    log.log(0, {"val/mean": 0.5})
    log._times[0] = (0, log._times[0][1] - 2.0)
    log.log(1, {})
    assert "step  1/10  eta 18s" in log_text(tmp_path)
    log.close()


def test_quiet_shows_warnings_only(tmp_path, capsys):
    with logger(tmp_path, console="quiet", stream=None) as log:
        log.plan(["x"])
        log.log(1, {"reward/mean": 1.0})
        log.info("x")
        log.warning("broken")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "warning: broken\n"
    assert "reward 1.000" in log_text(tmp_path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_which_screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert isinstance(make_screen("auto", 1, stream=io.StringIO()), PlainScreen)
    assert isinstance(make_screen("auto", 1, stream=Terminal()), LiveScreen)
    assert isinstance(make_screen("plain", 1, stream=Terminal()), PlainScreen)
    assert isinstance(make_screen("live", 1, stream=io.StringIO()), LiveScreen)
    assert isinstance(make_screen("quiet", 1), QuietScreen)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_screen("auto", 1, stream=Terminal()), PlainScreen)


def test_the_live_picture():
    screen = LiveScreen(200, Console(file=io.StringIO(), width=120))
    for step in range(1, 20):
        values = {"reward/mean": step / 20, "policy/entropy": 0.5, "time/step_s": 8.4, "perf/tokens_per_s": 18412.0}
        screen.step(step, values, change=-0.1 if step == 19 else 0.1, eta_s=1440.0)
    screen.phase("generate")
    screen.progress("generate", 13, 32)
    screen._messages.append(("health", "[bold]37% of groups[/bold]"))
    console = Console(file=io.StringIO(), width=120)
    console.print(screen.render())
    text = console.file.getvalue()
    assert "step 19/200" in text
    assert "eta 24m00s" in text
    assert "generating" in text
    assert "13/32" in text
    assert re.search(r"step +reward +entropy +tok/s +seconds", text), "only columns that have values"
    assert re.search(r"^ *19 +0\.950 ▼ +0\.5 +18\.4k +8\.4", text, re.M)
    assert not re.search(r"^ *7 +0\.350", text, re.M), "the last twelve steps"
    assert "[bold]37% of groups[/bold]" in text, "text from outside is not markup"


def test_a_live_run_ends_cleanly(tmp_path):
    stream = Terminal()
    with logger(tmp_path, console="live", stream=stream) as log:
        log.plan(["generate  4 x 8"])
        for step in (1, 2):
            log.phase("generate")
            log.progress("generate", 1, 2)
            log.log(step, {"reward/mean": 0.5, "reward/unscorable": 1.0, "rollout/samples": 4.0})
        log.info("saved")
    text = stream.getvalue()
    assert "generate  4 x 8" in text
    assert "0.500" in text
    assert "saved" in text
    assert "could not be scored" in text
    assert text.rstrip().endswith(str(tmp_path)) or "finished" in text
    assert "step  2/10  reward 0.500" in log_text(tmp_path)
    assert "\x1b[?25h" in text, "the cursor is shown again"
