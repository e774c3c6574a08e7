"""The kernel tests once more in processes of their own, every op in Triton's interpreter.

Memory accesses are watched there (`kernel_interpreter.py`) and outputs start as NaN. The decorator decides at import,
so a process can interpret kernels or compile them, not both. The processes run one after another beside the other
tests (`conftest.py` starts them and puts these tests last).
"""

import pytest
from interpreter_runs import result_of
from kernel_cases import TRITON

# files that run both ways; a process each for the head's, which take longest
RUNS = {
    "batch": (
        "test_kernel_gae.py", "test_kernel_groups.py", "test_kernel_losses.py", "test_kernel_mismatch.py",
        "test_kernel_ragged.py", "test_kernel_harness.py",
    ),
    "log_prob": ("test_log_prob.py",),
    "linear_head": ("test_linear_head.py",),
    "logits_token_loss": ("test_logits_token_loss.py",),
}  # fmt: skip


@pytest.mark.skipif(TRITON, reason="already there")
@pytest.mark.parametrize("files", RUNS.values(), ids=list(RUNS))
def test_in_the_interpreter(files):
    result = result_of(files)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
