"""The harness notices what it is there for: wild and misaligned accesses, races, truncating casts, wrong code."""

import numpy as np
import ptx_machine
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import TRITON
from kernel_target import on_target

interpreted = pytest.mark.skipif(not TRITON, reason="runs in the interpreter process")
compiled = pytest.mark.skipif(TRITON, reason="the interpreter process cannot compile")


@triton.jit
def copy_kernel(x, y, n, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i + shift, mask=i < n).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def clash_kernel(y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.arange(0, BLOCK) + tl.program_id(0))


@triton.jit
def half_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(y + i, value + value)


@triton.jit
def rows_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(y + i, tl.cumsum(value, axis=0) / tl.sum(value, axis=0) + tl.max(value, axis=0))


@interpreted
def test_the_interpreter_is_watched():
    from kernel_interpreter import KernelFault

    x, y = torch.zeros(50), torch.zeros(50)
    copy_kernel[(2,)](x, y, 50, 0, BLOCK=32)
    with pytest.raises(KernelFault, match="load out of bounds, 50 elements into x of 50"):
        copy_kernel[(2,)](x, y, 50, 1, BLOCK=32)
    with pytest.raises(KernelFault, match="store out of bounds"):
        copy_kernel[(2,)](torch.zeros(64), y[:40], 50, 0, BLOCK=32)
    with pytest.raises(KernelFault, match="race on y"):
        clash_kernel[(2,)](torch.zeros(16, dtype=torch.int32), BLOCK=16)
    with pytest.raises(KernelFault, match="bfloat16 arithmetic"):
        half_kernel[(1,)](*torch.zeros(2, 16, dtype=torch.bfloat16), BLOCK=16)
    source, target = torch.randn(32), torch.empty(32, dtype=torch.bfloat16)
    copy_kernel[(1,)](source, target, 32, 0, BLOCK=32)
    assert torch.equal(target, source.to(torch.bfloat16))


@compiled
@pytest.mark.parametrize("target", ["cuda:80", "cuda:100"])
def test_the_machine_computes_and_refuses(target):
    x, y = torch.rand(512), torch.empty(512)
    with on_target(target) as record:
        rows_kernel[(1,)](x, y, BLOCK=512)
        torch.testing.assert_close(y, x.cumsum(0) / x.sum() + x.max())
        assert record[0].loads[16] == 2048
        with pytest.raises(ptx_machine.PtxFault, match="load outside every buffer"):
            copy_kernel[(1,)](x, y, 512, 4, BLOCK=512)
        # a tensor that claims to be aligned and is not
        odd = torch.rand(520)[1:513]
        record[0].compiled = None
        memory = ptx_machine.Memory.of([("x", odd)])
        with pytest.raises(ptx_machine.PtxFault, match="misaligned"):
            memory.read(np.array([odd.data_ptr()], dtype=np.int64), 16)
