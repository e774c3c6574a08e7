"""Every buffer that a kernel writes starts out as NaN: a place that it forgets fails the test."""

import pytest
import torch

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
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn)
