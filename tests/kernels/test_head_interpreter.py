"""The head's tests once more with every op in Triton's interpreter (see test_kernel_interpreter.py)."""

import pytest
from kernel_cases import TRITON
from test_kernel_interpreter import run_interpreted

pytestmark = pytest.mark.skipif(TRITON, reason="already there")


@pytest.mark.parametrize("file", ["test_log_prob.py", "test_linear_head.py", "test_logits_token_loss.py"])
def test_head_in_the_interpreter(file):
    run_interpreted([file])
