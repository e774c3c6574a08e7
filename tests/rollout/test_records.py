"""Rollout files: what is written comes back, limits hold, and errors say which steps there are."""

import json
import math

import pytest

from fastrl.errors import DataError
from fastrl.rollout.records import RolloutRecord, RolloutWriter, read_step, step_files


def record(sample_id, *, step=3, **more):
    base = {
        "step": step,
        "sample_id": sample_id,
        "group_id": sample_id // 2,
        "prompt": 'What is 2 + 2?\n"é',
        "response": "4 \u2028<script>",
        "score": 1.0,
        "finish_reason": "stop",
        "length": 3,
    }
    return RolloutRecord(**{**base, **more})


def test_round_trip_in_order(tmp_path):
    records = [
        record(0, components={"math": 1.0, "format": None}, advantage=-0.25, policy_version=7, answer="4"),
        record(1, finish_reason="length", data_source="gsm8k"),
        record(2, split="validation"),
    ]
    path = RolloutWriter(tmp_path / "rollouts").write(3, records)
    assert path.name == "step_000003.jsonl"
    assert list(read_step(tmp_path / "rollouts", 3)) == records
    assert list(read_step(tmp_path)) == records, "a run folder means its rollouts"
    assert len(path.read_text().split("\n")) == 4, "one line a sample whatever the text holds"


def test_limit_counts_each_split(tmp_path):
    writer = RolloutWriter(tmp_path, max_samples=2)
    writer.write(1, [record(i) for i in range(5)] + [record(i, split="validation") for i in range(5)])
    assert [(r.sample_id, r.split) for r in read_step(tmp_path, 1)] == [
        (0, "train"),
        (1, "train"),
        (0, "validation"),
        (1, "validation"),
    ]


def test_numbers_that_are_not_finite_and_odd_answers(tmp_path):
    odd = record(0, score=math.nan, components={"a": math.inf}, answer={"x": (1, object)})
    path = RolloutWriter(tmp_path).write(1, [odd])
    loaded = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert loaded["score"] is None
    assert loaded["components"] == {"a": None}
    assert loaded["answer"] == {"x": [1, "<class 'object'>"]}


def test_rewriting_a_step_and_going_back(tmp_path):
    writer = RolloutWriter(tmp_path)
    for step in (1, 2, 3, 10):
        writer.write(step, [record(0, step=step)])
    writer.write(2, [record(5, step=2)])
    assert [r.sample_id for r in read_step(tmp_path, 2)] == [5]
    assert writer.forget_after(2) == 2
    assert list(step_files(tmp_path)) == [1, 2]
    assert [r.step for r in read_step(tmp_path)] == [2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]


def test_errors_name_what_there_is(tmp_path):
    with pytest.raises(DataError, match=r"no rollouts in .*rollouts_every_steps"):
        list(read_step(tmp_path))
    writer = RolloutWriter(tmp_path)
    for step in (1, 2, 3, 7):
        writer.write(step, [record(0)])
    with pytest.raises(DataError, match=r"no rollouts of step 5 .* there are 4, of steps 1-3, 7"):
        list(read_step(tmp_path, 5))
    (tmp_path / "step_000007.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(DataError, match=r"step_000007.jsonl:1: not a rollout record"):
        list(read_step(tmp_path, 7))


def test_fields_of_a_newer_version_are_ignored(tmp_path):
    path = RolloutWriter(tmp_path).write(1, [record(0)])
    path.write_text(json.dumps({**json.loads(path.read_text()), "new_field": 1}) + "\n")
    assert [r.sample_id for r in read_step(tmp_path, 1)] == [0]
