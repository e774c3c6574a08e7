"""`pytest bench/`: chooses what this machine can do, prints one table, writes one results file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.bars import check
from bench.harness.machine import ceilings, machine_name
from bench.harness.measure import OURS, Case, Measured
from bench.harness.peers import PEERS, Peers
from bench.harness.results import default_path, save
from bench.harness.table import lost, table


class Clock:
    """pytest-benchmark's clock: it moves by the CPU seconds that a variant says it took, wherever it ran."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class State:
    """What a session gathers."""

    def __init__(self, config: pytest.Config) -> None:
        self.smoke = config.getoption("--smoke")
        names = [*PEERS, "peers"]
        self.peers = Peers({name: config.getoption(f"--{name}-python") for name in names})
        self.ceilings: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []

    def rates(self) -> dict[str, float]:
        """The machine's ceilings, measured when first needed."""
        if not self.ceilings:
            self.ceilings = ceilings(quick=self.smoke)
        return self.ceilings


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastrl bench")
    group.addoption("--smoke", action="store_true", help="tiny sizes, one round: fails on wrong results only")
    group.addoption("--full", action="store_true", help="also the sizes that do not fit into ten minutes")
    group.addoption("--model", default=os.environ.get("FASTRL_BENCH_MODEL"), help="folder of a small chat model")
    group.addoption("--out", default=None, help="results file; default bench/results/<machine>-<date>.json")
    for name in [*PEERS, "peers"]:
        group.addoption(f"--{name}-python", default=None, help=f"interpreter that has {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "benchmark_quiet"):
        config.option.benchmark_quiet = True  # one table: ours
    config.stash[STATE] = State(config)


STATE = pytest.StashKey[State]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """End-to-end runs only when they are asked for by their marker; every benchmark on the clock of CPU seconds."""
    if "e2e" not in (config.option.markexpr or ""):
        kept = [item for item in items if item.get_closest_marker("e2e") is None]
        gone = [item for item in items if item.get_closest_marker("e2e") is not None]
        items[:] = kept
        if gone:
            config.hook.pytest_deselected(items=gone)
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))
        if config.pluginmanager.has_plugin("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads beside anything else busy swing by factors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def state(request: pytest.FixtureRequest) -> State:
    return request.config.stash[STATE]


@pytest.fixture(scope="session")
def smoke(state: State) -> bool:
    """True when sizes have to be tiny."""
    return state.smoke


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """True when time does not matter."""
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def peers(state: State) -> Peers:
    return state.peers


@pytest.fixture
def model_folder(request: pytest.FixtureRequest) -> str:
    """A small chat model in Hugging Face's format; skips without one."""
    folder = request.config.getoption("--model")
    if not folder or not Path(folder, "config.json").exists():
        pytest.skip("no model: give --model DIR or FASTRL_BENCH_MODEL")
    return folder


@pytest.fixture
def bench(benchmark: Any, state: State) -> Callable[[Case], list[dict[str, Any]]]:
    """Gate and time a case; its rows join the table. A wrong result of ours fails the test."""

    def run(case: Case) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        measured = Measured(case, state.rates())
        try:
            measured.gate()
            wrong = [row for row in measured.rows.values() if row["variant"].startswith(OURS) and "wrong" in row]
            state.rows += measured.rows.values()
            assert not wrong, f"{case.name}: ours is wrong and was not timed: {wrong}"
            time_in_turns(benchmark, measured, 1 if state.smoke else case.rounds)
            return measured.finish()
        finally:
            measured.close()

    return run


def time_in_turns(benchmark: Any, measured: Measured, rounds: int) -> None:
    """Rounds of one timing per variant; pytest-benchmark keeps ours."""
    ours = next(name for name in measured.times if name.startswith(OURS))

    def others() -> None:
        for name in list(measured.times):
            if name != ours and not measured.is_enough(name, ours):
                measured.turn(name)

    def mine() -> None:
        CLOCK.now += measured.turn(ours)

    benchmark.pedantic(mine, setup=others, rounds=rounds)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    state = config.stash[STATE]
    state.peers.close()
    if not state.rows:
        return
    write = terminalreporter.write_line
    write("")
    write(f"{machine_name()}, one thread, CPU time; ratio = median over ours; floor = least possible / least measured")
    for line in table(state.rows):
        write(line)
    for name, reason in state.peers.skipped.items():
        write(f"{name}: {reason}")
    for line in [] if state.smoke else lost(state.rows):
        write(f"LOST    {line}")
    bars = check(state.rows)
    for bar in bars:
        write(f"{'holds' if bar['holds'] else 'MISSED':7s} {bar['bar']}: {bar['measured']}")
    if state.smoke and config.getoption("--out") is None:
        return
    path = Path(config.getoption("--out") or default_path())
    save(path, state.rows, ceilings=state.ceilings, peers=state.peers.versions, skipped=state.peers.skipped, bars=bars)
    write(f"written: {path}")
