"""Clocks and memory watches: nothing waits before the log boundary, nested phases have peaks of their own."""

import numpy as np
import pytest
import torch

from fastrl.trainer import instruments
from fastrl.trainer.instruments import DeviceClock, HostMemory, PeakMemory
from fastrl.trainer.metrics import Metrics


class Event:
    """Stands for a device event: happens at a number that the fake queue counts, and remembers who waited."""

    queue = 0.0
    waited = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = Event.queue

    def synchronize(self):
        Event.waited += 1

    def elapsed_time(self, other):
        return (other.at - self.at) * 1000.0


def test_device_phases_are_read_at_the_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    Event.queue, Event.waited = 0.0, 0
    metrics = Metrics()
    metrics.clock = DeviceClock(torch.device("cuda"))
    started = metrics.clock.mark()
    for seconds in (2.0, 0.5):
        with metrics.timer("update_actor"):
            Event.queue += seconds
    metrics.add_span("time/step_s", started)
    assert Event.waited == 0
    values = metrics.reduce()
    assert values["time/update_actor_s"] == 2.5 and values["time/step_s"] == 2.5
    assert Event.waited == 3


class Counter:
    """A peak that can only be read and reset."""

    def __init__(self):
        self.now = self.highest = 0.0

    def use(self, amount):
        self.now = amount
        self.highest = max(self.highest, amount)

    def reset(self):
        self.highest = self.now

    def peak(self):
        return self.highest


def test_peaks_of_nested_phases():
    counter = Counter()
    watch = PeakMemory(counter)
    counter.use(100)  # before any phase
    counter.use(10)
    watch.begin()
    counter.use(30)
    counter.use(12)
    watch.begin()
    counter.use(20)
    assert watch.end() == 20, "the inner phase does not see what came before it"
    counter.use(5)
    assert watch.end() == 30, "the outer one keeps its peak from before the inner one"
    assert watch.take() == 100
    counter.use(7)
    watch.begin()
    counter.use(8)
    assert watch.end() == 8


def test_resident_memory_of_a_phase():
    memory = PeakMemory(HostMemory())
    memory.begin()
    before = memory.end()
    if not before:
        pytest.skip("this system does not tell the resident memory of a process")
    memory.begin()
    block = np.ones(48 << 17)  # 48 MiB
    peak = memory.end()
    assert block.nbytes == 48 << 20
    assert peak - before > 40 << 20
    assert memory.take() >= peak


def test_a_peak_that_the_process_has_not_seen_before(monkeypatch):
    """(resident, highest): a phase that raises the highest has it; another has the larger of its borders."""
    readings = iter([(10.0, 50.0), (12.0, 70.0), (12.0, 70.0), (11.0, 70.0)])
    monkeypatch.setattr(HostMemory, "_read", lambda self: next(readings))
    memory = HostMemory()
    memory.reset()
    assert memory.peak() == 70
    memory.reset()
    assert memory.peak() == 12


def test_a_watched_phase_has_time_and_memory():
    metrics = Metrics(strict=True)
    metrics.watch(torch.device("cpu"))
    with metrics.timer("generate"):
        pass
    metrics.add_memory("cpu")
    values = metrics.reduce()
    assert values["time/generate_s"] >= 0
    assert values["memory/peak_rss_gib"] >= values["memory/peak/generate_gib"] >= 0
    assert instruments.clock_of(torch.device("cuda")).__class__ is DeviceClock


def test_rates_by_hand():
    metrics = Metrics(strict=True)
    metrics.add_sum("perf/model_flops", 6e12)
    metrics.add_sum("perf/peak_flops", 8e12)
    metrics.add_sum("rollout/tokens", 90)
    metrics.add_seconds("time/update_actor_s", 2.0)
    metrics.add_seconds("time/old_log_prob_s", 1.0)
    metrics.add_seconds("time/generate_s", 50.0)
    values = metrics.reduce()
    assert values["perf/flops_per_s"] == 2e12
    assert values["perf/mfu"] == 0.25
    assert values["perf/train_tokens_per_s"] == 30


def test_a_muted_copy_counts_once():
    """Two contributions of which one is a copy: sums and means as from one, extremes and times stay."""
    metrics = Metrics()
    metrics.muted = True
    metrics.add_mean("policy/entropy", torch.tensor([5.0]))
    metrics.add_sum("perf/head_rows", 3)
    metrics.add_max("policy/ratio/max", 2.0)
    with metrics.counted():
        metrics.add_sum("perf/exchange_bytes", 4)
    metrics.add_sum("perf/exchange_bytes", 100)
    values = metrics.reduce()
    assert values == {"policy/ratio/max": 2.0, "perf/exchange_bytes": 4.0, "perf/nan_values": 0.0}
