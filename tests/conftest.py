"""What holds for all tests; and slow tests in parts, for CI: another part at every commit, none begun out of time."""

from __future__ import annotations

import signal
import time

import pytest

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parts")
    group.addoption("--part", default=None, metavar="K/N", help="every N-th test only, from the K-th (0 .. N-1)")
    group.addoption("--budget-s", type=float, default=None, help="seconds after which the tests left are skipped")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    number, _, count = part.partition("/")
    if not number.isdigit() or not count.isdigit() or not 0 <= int(number) < int(count):
        raise pytest.UsageError(f"--part {part}: expected K/N with 0 <= K < N, such as 0/6")
    chosen = items[int(number) :: int(count)]
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % int(count) != int(number)])
    items[:] = chosen


@pytest.fixture(autouse=True, scope="session")
def _started() -> float:
    return time.monotonic()


@pytest.fixture(autouse=True)
def _within_budget(request: pytest.FixtureRequest, _started: float) -> None:
    budget = request.config.getoption("--budget-s")
    if budget is not None and time.monotonic() - _started > budget:
        pytest.skip(f"out of time: more than {budget:.0f} s")
