"""The kernel tests once more in a process of their own, every op in Triton's interpreter.

Memory accesses are watched there (`kernel_interpreter.py`) and outputs start as NaN. The decorator decides at import,
so a process can interpret kernels or compile them, not both.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import TRITON

HERE = Path(__file__).parent
# files that run both ways; the head's are in its own list
BATCH = ["test_kernel_gae.py", "test_kernel_groups.py", "test_kernel_losses.py", "test_kernel_mismatch.py"]
BATCH += ["test_kernel_ragged.py", "test_kernel_harness.py"]


def run_interpreted(files):
    """Run test files with every op forced to its Triton kernel."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "FASTRL_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not slow", "-W", "ignore", "-p", "no:cacheprovider", *files],
        cwd=HERE,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(TRITON, reason="already there")
def test_batch_ops_in_the_interpreter():
    run_interpreted(BATCH)
