"""Curves: what is drawn is what was logged; missing data, packages and formats are named."""

import sys

import pytest

from fastrl.errors import ConfigError, DataError
from fastrl.report.metrics_file import MetricsFile
from fastrl.report.plots import _smooth, make_figure, plot_runs

pytest.importorskip("matplotlib")


def run(folder, values, steps=4):
    file = MetricsFile(folder / "metrics.jsonl")
    for step in range(steps + 1):
        file.write(step, 0.0, {name: function(step) for name, function in values.items() if function(step) is not None})
    file.close()
    return folder


@pytest.fixture
def first(tmp_path):
    return run(
        tmp_path / "first",
        {
            "reward/mean": lambda s: s / 4 if s else None,
            "reward/std": lambda s: 0.5 if s else None,
            "reward/min": lambda s: 0.0 if s else None,
            "reward/max": lambda s: 1.0 if s else None,
            "val/mean": lambda s: s / 8 if s % 2 == 0 else None,
            "policy/clip_fraction/high": lambda s: 0.02 if s else None,
            "policy/clip_fraction/low": lambda s: 0.0 if s else None,
            "policy/clip_fraction/dual": lambda s: 0.0 if s else None,
            "rollout/truncated_fraction": lambda s: 0.0 if s else None,
            "time/generate_s": lambda s: 2.0 * s if s else None,
            "time/update_actor_s": lambda s: 1.0 if s else None,
        },
    )


@pytest.fixture
def second(tmp_path):
    return run(tmp_path / "second", {"reward/mean": lambda s: 1 - s / 4 if s else None})


def panels(figure):
    return {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_visible()}


def test_values_are_those_of_the_file(first):
    found = panels(make_figure([first]))
    assert list(found) == ["reward", "held-out score", "clipped tokens", "time of a step"], "only what has data"
    line = found["reward"].lines[0]
    assert line.get_xdata().tolist() == [1, 2, 3, 4]
    assert line.get_ydata().tolist() == [0.25, 0.5, 0.75, 1.0]
    assert found["held-out score"].lines[0].get_xdata().tolist() == [0, 2, 4]
    assert found["clipped tokens"].lines[0].get_ydata().tolist() == [2.0] * 4, "in percent"
    assert found["clipped tokens"].get_ylabel() == "%"
    band = found["reward"].collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.0, 1.0), "within what the rewards were"
    bars = found["time of a step"].patches
    assert [bar.get_width() for bar in bars] == [5.0, 1.0], "means over trained steps: (2+4+6+8)/4 and 1"


def test_several_runs_are_overlaid(first, second):
    figure = make_figure([first, second])
    reward = panels(figure)["reward"]
    assert [line.get_ydata().tolist() for line in reward.lines] == [[0.25, 0.5, 0.75, 1.0], [0.75, 0.5, 0.25, 0.0]]
    assert reward.lines[0].get_color() != reward.lines[1].get_color()
    assert [text.get_text() for text in figure.legends[0].texts] == ["first", "second"]
    named = make_figure([first, second], names=["ours", "theirs"])
    assert [text.get_text() for text in named.legends[0].texts] == ["ours", "theirs"]


def test_long_curves_are_smoothed_around_their_values(tmp_path):
    folder = run(tmp_path / "long", {"reward/mean": lambda s: float(s % 2)}, steps=100)
    raw, smooth = panels(make_figure([folder]))["reward"].lines
    assert raw.get_ydata().tolist() == [s % 2 for s in range(101)]
    assert abs(smooth.get_ydata() - 0.5).max() < 0.2
    assert _smooth([1.0, 2.0, 3.0, 4.0, 10.0]) == [2.0, 2.5, 4.0, 4.75, 17 / 3]


def test_pictures_are_written(first, second, tmp_path):
    out = plot_runs([first, second], tmp_path / "new" / "curves.png")
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert out.stat().st_size > 10_000
    assert plot_runs([first], tmp_path / "a.svg").read_text().startswith("<?xml")


def test_chosen_metrics(first):
    found = panels(make_figure([first], ["policy/clip_fraction/*", "reward/std"]))
    assert list(found) == [f"policy/clip_fraction/{k}" for k in ("dual", "high", "low")] + ["reward/std"]
    with pytest.raises(DataError, match=r"reward/meen: no such metric .* near: reward/mean"):
        make_figure([first], ["reward/meen"])


def test_errors(first, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"curves\.gif: pictures are written as \.png"):
        plot_runs([first], "curves.gif")
    with pytest.raises(DataError, match=r"no metrics\.jsonl there"):
        plot_runs([tmp_path / "nothing"], tmp_path / "x.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match=r"no step has been logged yet"):
        plot_runs([tmp_path / "empty"], tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'fastrl\[plot\]'"):
        plot_runs([first], tmp_path / "x.png")
