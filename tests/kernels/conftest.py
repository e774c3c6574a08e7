"""Every buffer that a kernel writes starts out as NaN: a place that it forgets fails the test.

The runs in Triton's interpreter start with the session, beside the other tests, and are asked for at its end.
"""

import pytest
import torch
from interpreter_runs import background

from fastrl.kernels.dispatch import interpreting

if interpreting():
    import kernel_interpreter

    kernel_interpreter.install()


@pytest.fixture(autouse=True)
def poison_new_tensors():
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn)


def interpreted(item):
    return getattr(item, "originalname", "") == "test_in_the_interpreter"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=interpreted)


def pytest_collection_finish(session):
    for item in session.items:
        if interpreted(item) and not interpreting() and not session.config.option.collectonly:
            background.start(item.callspec.params["files"])


def pytest_sessionfinish():
    background.stop()
