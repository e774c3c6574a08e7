"""metrics.jsonl: strict JSON, flushed per line, cut back on resume, readable after a kill."""

import json
import math

import pytest

from fastrl.errors import DataError
from fastrl.report.metrics_file import MetricsFile, forget_after, read_metrics


def write(path, steps):
    file = MetricsFile(path)
    for step in steps:
        file.write(step, 1000.0 + step, {"reward/mean": step / 10})
    file.close()


def test_lines_are_strict_json_and_flushed(tmp_path):
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.write(1, 1234.56789, {"b": 0.1 + 0.2, "a": math.nan, "c": -math.inf, "d": 3})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()  # before close
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"step": 1, "time": 1234.568, "a": None, "b": 0.30000000000000004, "c": None, "d": 3.0}
    assert list(row)[:2] == ["step", "time"]
    file.close()
    assert read_metrics(tmp_path / "run") == [{"step": 1, "time": 1234.568, "b": 0.30000000000000004, "d": 3.0}]


def test_resume_cuts_later_steps_and_a_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [0, 1, 2, 3, 4])
    with open(path, "a") as file:
        file.write('{"step": 5, "ti')
    assert forget_after(path, 2) == 3
    write(path, [3, 4])
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    assert path.read_text().count("\n") == 5
    assert forget_after(path, 9) == 0
    assert forget_after(tmp_path / "none.jsonl", 1) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_reading_a_run_that_was_killed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with open(path, "a") as file:
        file.write('{"step": 3, "ti')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_errors(tmp_path):
    with pytest.raises(DataError, match=r"no metrics\.jsonl there"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(tmp_path)
