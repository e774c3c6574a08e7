"""Triton's CPU interpreter, mended and watched: `install()` once in a process that runs with TRITON_INTERPRET=1.

- float32 -> bfloat16 rounds to nearest even (the interpreter truncates);
- bfloat16 values must not take part in arithmetic (the interpreter would work on their raw bits): an error;
- a load or store outside the tensors of its launch is an error before memory is touched (it would corrupt the heap);
- an element written by one program and touched by another is a race, unless the toucher has done an atomic before.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

Builder = interpreter.InterpreterBuilder
# kernels that reach tensors through a table of addresses: only their stores are checked
BY_ADDRESS = {"pack_kernel"}


class KernelFault(RuntimeError):
    """A kernel touched memory that it must not touch."""


class _Buffer:
    def __init__(self, name: str, tensor: torch.Tensor):
        elements = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.name, self.start, self.size = name, tensor.data_ptr(), elements * tensor.element_size()
        self.width = tensor.element_size()
        self.writer = np.full(self.size, -1, np.int64)
        self.reader = np.full(self.size, -1, np.int64)


class _Watch:
    """The accesses of one launch."""

    def __init__(self, kernel: str, tensors: list[tuple[str, torch.Tensor]]):
        self.kernel = kernel
        self.buffers = [_Buffer(n, t) for n, t in tensors if t.numel()]
        self.synchronised: set[int] = set()

    @staticmethod
    def program() -> int:
        x, y, z = interpreter.interpreter_builder.grid_idx
        return (z << 42) + (y << 21) + x

    def check(self, pointers: np.ndarray, mask: np.ndarray, width: int, kind: str) -> None:
        if kind == "load" and self.kernel in BY_ADDRESS:
            return
        wide = np.broadcast_shapes(pointers.shape, mask.shape)
        address = np.broadcast_to(pointers, wide)[np.broadcast_to(mask, wide)].astype(np.int64)
        left = np.ones(address.shape, bool)
        for buffer in self.buffers:
            here = left & (address >= buffer.start) & (address + width <= buffer.start + buffer.size)
            if here.any():
                left &= ~here
                self._order(buffer, address[here] - buffer.start, kind)
        if left.any():
            bad = int(address[left][0])
            near = min(self.buffers, key=lambda b: min(abs(bad - b.start), abs(bad - b.start - b.size)))
            raise KernelFault(
                f"{self.kernel}: {kind} out of bounds, {(bad - near.start) / near.width:g} elements into {near.name} "
                f"of {near.size // near.width}, program {interpreter.interpreter_builder.grid_idx}"
            )

    def _order(self, buffer: _Buffer, offsets: np.ndarray, kind: str) -> None:
        me = self.program()
        if kind == "atomic":
            self.synchronised.add(me)
            return
        if me in self.synchronised:
            return
        writer = buffer.writer[offsets]
        if ((writer >= 0) & (writer != me)).any():
            raise KernelFault(f"{self.kernel}: race on {buffer.name}: two programs, one of them writing ({kind})")
        if kind == "store":
            reader = buffer.reader[offsets]
            if ((reader >= 0) & (reader != me)).any():
                raise KernelFault(f"{self.kernel}: race on {buffer.name}: written after another program read it")
            buffer.writer[offsets] = me
        else:
            buffer.reader[offsets] = me


_watch: _Watch | None = None


def _width(handle) -> int:
    return max(1, handle.get_element_ty().primitive_bitwidth // 8)


def _watched(method: str, kind: str, pointers_at: int, mask_at: int | None):
    """Wrap a builder method so that its accesses are checked first; where its arguments stand, self not counted."""
    original = getattr(Builder, method)

    def run(self, *args, **named):
        if _watch is not None:
            pointers = args[pointers_at]
            mask = np.ones(pointers.data.shape, bool)
            if mask_at is not None and args[mask_at] is not None:
                mask = np.asarray(getattr(args[mask_at], "data", args[mask_at])).astype(bool)
            _watch.check(pointers.data, mask, _width(pointers), kind)
        return original(self, *args, **named)

    setattr(Builder, method, run)


def _round_to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


def _mend_bf16() -> None:
    def patched(original):
        def run(self, source, target, *rest):
            if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
                return interpreter.TensorHandle(_round_to_bf16(source.data), tl.bfloat16)
            return original(self, source, target, *rest)

        return run

    Builder.cast_impl = patched(Builder.cast_impl)
    Builder.create_fp_to_fp = patched(Builder.create_fp_to_fp)
    arithmetic, comparisons = Builder.binary_op, (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def binary(self, left, right, op):
        if left.dtype.scalar == tl.bfloat16 and op not in comparisons:
            raise KernelFault("bfloat16 arithmetic: load, then .to(tl.float32) first")
        return arithmetic(self, left, right, op)

    Builder.binary_op = binary


def install() -> None:
    """Mend and watch the interpreter of this process."""
    _mend_bf16()
    _watched("create_masked_load", "load", 0, 1)
    _watched("create_masked_store", "store", 0, 2)
    _watched("create_atomic_rmw", "atomic", 1, 3)
    _watched("create_atomic_cas", "atomic", 0, None)
    executor = interpreter.GridExecutor
    prepare, call = executor._init_args_hst, executor.__call__

    def prepared(self, args, kwargs):
        global _watch
        hosts, named = prepare(self, args, kwargs)
        pairs = [*zip(self.arg_names, hosts, strict=False), *named.items()]
        _watch = _Watch(self.fn.__name__, [(n, t) for n, t in pairs if isinstance(t, torch.Tensor)])
        return hosts, named

    def called(self, *args, **kwargs):
        global _watch
        try:
            return call(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, KernelFault):
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            raise
        finally:
            _watch = None

    executor._init_args_hst, executor.__call__ = prepared, called
