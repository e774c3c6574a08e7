"""The step line: what numbers look like, and that a program can read it back."""

import math
import re

import pytest

from fastrl.report.text import cells, duration, percent, short, step_line, time_split

STEP = {
    "reward/mean": 0.6123,
    "kl/reference": 0.00412,
    "kl/old_k3": 7.0,
    "policy/entropy": 0.4109,
    "policy/clip_fraction/low": 0.008,
    "policy/clip_fraction/high": 0.0213,
    "rollout/length/mean": 312.4,
    "rollout/truncated_fraction": 0.04,
    "mismatch/abs/mean": 1.23e-4,
    "perf/tokens_per_s": 18412.0,
    "memory/device_peak_gib": 61.24,
    "memory/device_total_gib": 139.1,
    "memory/rss_gib": 3.0,
    "time/generate_s": 4.1,
    "time/reward_s": 1.0,
    "time/update_actor_s": 2.5,
    "time/advantage_s": 0.4,
    "time/sync_weights_s": 0.3,
}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.6149, "0.615"),
        (12.34, "12.3"),
        (0.0, "0"),
        (1.234e-4, "1.2e-4"),
        (-1.5e-7, "-1.5e-7"),
        (0.00412, "0.00412"),
        (999.6, "1000"),
        (1234.0, "1234"),
        (18412.0, "18.4k"),
        (2.5e6, "2.5M"),
        (3e9, "3G"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_percent_and_duration():
    assert [percent(x) for x in (0.0, 0.0213, 0.37, 0.0995, 1.0)] == ["0%", "2.1%", "37%", "10%", "100%"]
    assert [duration(x) for x in (0.4, 59, 60, 185, 3600, 7620, 270000)] == [
        "0s",
        "59s",
        "1m00s",
        "3m05s",
        "1h00m",
        "2h07m",
        "3d03h",
    ]


def test_the_line_of_a_step():
    line = step_line(42, 200, STEP, change=0.0312, eta_s=1440)
    assert line == (
        "step  42/200  reward 0.612 (+0.031)  kl 0.00412  entropy 0.411  clip 0.8%/2.1%  len 312 (4.0% cut)  "
        "mismatch 1.2e-4  18.4k tok/s  mem 61.2/139 GiB  [gen 5.1s | train 2.9 | sync 0.3]  eta 24m00s"
    )


def test_the_line_can_be_read_by_a_program():
    line = step_line(3, 200, {**STEP, "val/mean": 0.5}, change=-0.01, eta_s=9)
    fields = re.split(r"  +", line.replace("step   ", "step "))
    named = dict(field.split(" ", 1) for field in fields if re.match(r"[a-z]+ ", field))
    assert named["step"] == "3/200"
    assert named["reward"] == "0.612 (-0.010)"
    assert named["val"] == "0.500"
    assert float(named["kl"]) == 0.00412
    assert named["eta"] == "9s"


def test_what_was_not_measured_is_left_out():
    assert step_line(0, 9, {"val/mean": 0.25, "time/validate_s": 2.0}) == "step 0/9  val 0.250  [val 2.0s]"
    assert step_line(1, 9, {}) == "step 1/9"
    assert cells({"memory/rss_gib": 1.234}) == {"mem": "1.23 GiB"}
    assert cells({"policy/clip_fraction": 0.5}) == {"clip": "50%"}
    assert cells({"kl/old_k3": 0.25}) == {"kl": "0.25"}
    assert cells({"kl/old_k3": 0.0}) == {}
    assert time_split({"time/update_critic_s": 1.0, "time/values_s": 0.5, "time/checkpoint_s": 2.0}) == {
        "train": 1.5,
        "save": 2.0,
    }
