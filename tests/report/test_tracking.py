"""Trackers: real TensorBoard files; the others where installed; slow, broken and missing ones never disturb a run."""

import importlib.util
import math
import threading
import time

import pytest

from fastrl.errors import ConfigError
from fastrl.report import tracking
from fastrl.report.tracker_backends import finite, reachable
from fastrl.report.tracking import Trackers


def start(names, folder, **more):
    return Trackers.start(names, folder=folder, project="fastrl", name="run", config={"optim": {"lr": 1e-5}}, **more)


def test_missing_package_is_named(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a))
    with pytest.raises(ConfigError, match=r"logging\.trackers: wandb .*pip install 'fastrl\[wandb\]'"):
        start(["wandb"], tmp_path)
    with pytest.raises(ConfigError, match=r"comet is not one of tensorboard, wandb, swanlab, mlflow"):
        start(["comet"], tmp_path)


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    trackers = start(["tensorboard"], tmp_path)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": step / 4, "policy/entropy": math.nan})
    assert trackers.run_ids() == {"tensorboard": "run"}
    trackers.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    again = start(["tensorboard"], tmp_path, run_ids={"tensorboard": "run"}, resumed_step=1)
    again.log(2, {"reward/mean": 5.0})
    again.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 5.0)], "steps after the resumed one are gone"


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow"])
def test_offline_run_and_resume(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    troubles = []
    trackers = start([name], tmp_path, on_trouble=troubles.append)
    began = time.monotonic()
    trackers.log(1, {"reward/mean": 0.5, "val/x/pass@4": 1.0, "bad": math.inf})
    assert time.monotonic() - began < 0.1
    ids = trackers.run_ids()
    assert ids[name]
    trackers.close()
    assert troubles == []
    assert trackers.troubles() == {name: 0}
    assert any(tmp_path.rglob("*")), "something was written in the run folder"
    again = start([name], tmp_path, run_ids=ids, resumed_step=1, on_trouble=troubles.append)
    again.log(2, {"reward/mean": 0.75})
    if name != "swanlab":  # their offline runs have no identity to continue
        assert again.run_ids() == ids
    again.close("interrupted")
    assert troubles == []


class Recorder:
    """A tracker under the test's control."""

    opened = threading.Event()

    def __init__(self):
        self.seen = []
        self.status = None

    def start(self, info):
        self.info = info
        return info.run_id or "new-id"

    def log(self, step, values):
        self.seen.append((step, dict(values)))

    def finish(self, status):
        self.status = status


def use(monkeypatch, backend):
    monkeypatch.setitem(tracking.BACKENDS, "wandb", ("json", lambda: backend))
    return backend


def test_values_ids_and_status_arrive(tmp_path, monkeypatch):
    backend = use(monkeypatch, Recorder())
    trackers = start(["wandb"], tmp_path, run_ids={"wandb": "old-id"}, resumed_step=7)
    trackers.log(8, {"a": 1, "b": math.nan})
    trackers.close("failed")
    assert backend.seen == [(8, {"a": 1.0})]
    assert backend.status == "failed"
    assert (backend.info.run_id, backend.info.resumed_step) == ("old-id", 7)
    assert backend.info.config == {"optim": {"lr": 1e-5}}
    assert trackers.run_ids() == {"wandb": "old-id"}


def test_a_failing_tracker_is_counted_and_said_once(tmp_path, monkeypatch):
    class Failing(Recorder):
        def log(self, step, values):
            raise ConnectionError("no route\nmore")

    use(monkeypatch, Failing())
    said = []
    trackers = start(["wandb"], tmp_path, on_trouble=said.append)
    for step in range(5):
        trackers.log(step, {"a": 1.0})
    trackers.close()
    assert said == ["tracker wandb failed: ConnectionError: no route; training goes on"]
    assert trackers.troubles() == {"wandb": 5}


@pytest.mark.parametrize("error", [RuntimeError("bad key"), SystemExit(1)])
def test_a_tracker_that_cannot_be_opened(tmp_path, monkeypatch, error):
    class Broken(Recorder):
        def start(self, info):
            raise error

    use(monkeypatch, Broken())
    said = []
    trackers = start(["wandb"], tmp_path, on_trouble=said.append)
    trackers.log(1, {"a": 1.0})
    trackers.close()
    assert len(said) == 1
    assert said[0].startswith(f"tracker wandb could not be opened: {type(error).__name__}")
    assert trackers.run_ids() == {}
    assert trackers.troubles() == {"wandb": 1}


def test_a_hanging_tracker_delays_nothing(tmp_path, monkeypatch):
    release = threading.Event()

    class Hanging(Recorder):
        def start(self, info):
            release.wait(20)
            return "late"

        def log(self, step, values):
            release.wait(20)

    use(monkeypatch, Hanging())
    monkeypatch.setattr(tracking, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(tracking, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(tracking, "QUEUE_STEPS", 3)
    said = []
    began = time.monotonic()
    trackers = start(["wandb"], tmp_path, on_trouble=said.append)
    for step in range(10):
        trackers.log(step, {"a": 1.0})
    trackers.close()
    assert time.monotonic() - began < 2.0
    assert trackers.troubles()["wandb"] == 7
    assert any("has not opened" in line for line in said)
    assert any("too slow" in line for line in said)
    assert any("did not finish" in line for line in said)
    release.set()


def test_finite_and_reachable(monkeypatch):
    assert finite({"a": 1, "b": math.nan, "c": -math.inf}) == {"a": 1.0}
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    began = time.monotonic()
    assert not reachable("https://127.0.0.1:9")
    assert time.monotonic() - began < 4
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    assert reachable("https://127.0.0.1:9")
