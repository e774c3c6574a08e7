"""Executes the PTX that Triton emits, on CPU memory: what the compiler made of a kernel, checked without a GPU.

One CTA at a time with all its threads in lock step; a register is a NumPy vector over threads. Each access to global
memory has to fall inside a buffer of the launch and to be aligned to its width. Branches have to be uniform in the CTA,
as they are in Triton's output. Not modelled: ptxas, timing, races inside a CTA, tensor cores, TMA (refused by name).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from ptx_memory import U8, U32, Memory, PtxFault
from ptx_parser import Instruction, Kernel
from ptx_registers import SIGNED, U16, UNSIGNED, WARP, Arithmetic

__all__ = ["Memory", "PtxFault", "launch"]
_NOTHING = {"bar", "barrier", "fence", "membar", "griddepcontrol", "cp", "nanosleep"}


class Cta(Arithmetic):
    """One thread block."""

    def __init__(
        self, kernel: Kernel, threads: int, memory: Memory, values: dict, block: tuple, grid: tuple, shared: int
    ):
        self.kernel, self.threads, self.memory, self.values = kernel, threads, memory, values
        self.lanes = np.arange(threads)
        self.shared = np.full(max(shared, 16) + 256, 0xFF, U8)  # uninitialised shared memory is NaN
        self.registers: dict[str, np.ndarray] = {"global_smem": np.zeros(threads, U32)}
        thread = self.lanes.astype(U32)
        self.registers |= {"%tid.x": thread, "%laneid": thread % WARP, "%ntid.x": thread * 0 + U32(threads)}
        for axis, b, g in zip("xyz", block, grid, strict=True):
            self.registers |= {f"%ctaid.{axis}": thread * 0 + U32(b), f"%nctaid.{axis}": thread * 0 + U32(g)}

    def run(self, limit: int = 5_000_000) -> None:
        at, code = 0, self.kernel.code
        with np.errstate(all="ignore"):
            for _ in range(limit):
                if at >= len(code):
                    return
                step = code[at]
                at += 1
                active = None
                if step.guard is not None:
                    active = self.predicate(step.guard)
                    active = ~active if step.negated else active
                root = step.parts[0]
                if root in ("bra", "brx", "ret", "exit"):
                    if active is not None and not active.all():
                        if active.any():
                            raise PtxFault(f"divergent: {step.line}")
                        continue
                    if root in ("ret", "exit"):
                        return
                    label = step.operands[-1]
                    if root == "brx":
                        index = self.bits(step.operands[0], 32)
                        if (index != index[0]).any():
                            raise PtxFault(f"divergent: {step.line}")
                        label = self.kernel.tables[label][int(index[0])]
                    at = self.kernel.labels[label]
                elif active is None or active.any():
                    self.execute(step, active)
        raise PtxFault("too many steps")

    def execute(self, step: Instruction, active: np.ndarray | None) -> None:
        root = step.parts[0]
        if root in _NOTHING and "shared" not in step.opcode:
            return
        handler = getattr(self, f"do_{root}", None)
        try:
            if handler is not None:
                handler(step, active)
            elif step.parts[-1] == "pred":
                self.logic(step, active)
            elif step.parts[-1] == "f32x2":
                self.packed(step, active)
            elif step.parts[-1] in ("f32", "f64", "f16", "bf16"):
                self.float_arithmetic(step, active)
            else:
                self.integer_arithmetic(step, active)
        except (KeyError, ValueError, IndexError) as error:
            raise PtxFault(f"not modelled: {step.line} ({error!r})") from error

    def _chosen(self, active: np.ndarray | None) -> np.ndarray:
        return self.lanes if active is None else np.flatnonzero(active)

    def _vector(self, step: Instruction, operand: str) -> tuple[list[str], int]:
        """(registers of a vector operand, bits of each)."""
        registers = [r.strip() for r in operand.strip("{} ").split(",")]
        return registers, int(re.sub(r"\D", "", step.parts[-1]))

    def do_ld(self, step: Instruction, active: np.ndarray | None) -> None:
        if "param" in step.parts:
            return self._load_parameter(step, active)
        registers, width = self._vector(step, step.operands[0])
        size = width // 8 * len(registers)
        rows = self._chosen(active)
        place = self.address(step.operands[1])[rows]
        raw = np.zeros((self.threads, size), U8)
        if "global" in step.parts:
            raw[rows] = self.memory.read(place, size)
        else:
            raw[rows] = self.shared[place[:, None] + np.arange(size)]
        columns = raw.reshape(self.threads, len(registers), width // 8)
        for i, register in enumerate(registers):
            value = np.ascontiguousarray(columns[:, i]).view(UNSIGNED[width])[:, 0]
            if step.parts[-1][0] == "s" and width < 32:
                value = value.view(SIGNED[width]).astype(np.int32)
            self.put(register, value.astype(U16) if width == 8 else value, active)
        return None

    def _load_parameter(self, step: Instruction, active: np.ndarray | None) -> None:
        value, type_ = self.values[step.operands[1].strip("[] ")], step.parts[-1]
        width = int(type_[1:])
        if isinstance(value, float):
            raw = np.full(self.threads, value, np.float32).view(U32)
        else:
            raw = np.full(self.threads, int(value) & ((1 << width) - 1), UNSIGNED[width])
            if type_[0] == "s" and step.operands[0].startswith("%rd"):
                raw = raw.view(SIGNED[width]).astype(np.int64)
        self.put(step.operands[0], raw, active)

    def do_st(self, step: Instruction, active: np.ndarray | None) -> None:
        registers, width = self._vector(step, step.operands[1])
        rows = self._chosen(active)
        place = self.address(step.operands[0])[rows]
        columns = [self.bits(r, width)[rows] for r in registers]
        raw = np.stack(columns, axis=1).view(U8).reshape(len(rows), -1)
        if "global" in step.parts:
            self.memory.write(place, raw)
        else:
            self.shared[(place[:, None] + np.arange(raw.shape[1])).ravel()] = raw.ravel()

    def do_atom(self, step: Instruction, active: np.ndarray | None) -> None:
        if "global" not in step.parts or "add" not in step.parts:
            raise PtxFault(f"not modelled: {step.line}")
        type_ = step.parts[-1]
        width = int(type_[1:])
        place, add = self.address(step.operands[1]), self.number(step.operands[2], type_)
        before = np.zeros(self.threads, add.dtype)
        for lane in self._chosen(active):
            here = place[lane : lane + 1]
            old = self.memory.read(here, width // 8).view(add.dtype)[:, 0]
            before[lane] = old[0]
            self.memory.write(here, (old + add[lane]).astype(add.dtype).view(U8).reshape(1, -1))
        self.put(step.operands[0], before, active)

    def _matrix_places(self, step: Instruction, operand: str) -> list[np.ndarray]:
        """Shared-memory offsets of each thread's pair of 16-bit elements in matrices 0, 1, ..."""
        count = {"x1": 1, "x2": 2, "x4": 4}[next(p for p in step.parts if p in ("x1", "x2", "x4"))]
        rows = self.address(operand)
        lane, warp = self.lanes % WARP, self.lanes // WARP * WARP
        return [rows[warp + 8 * i + lane // 4] + (lane % 4) * 4 for i in range(count)]

    def do_ldmatrix(self, step: Instruction, active: np.ndarray | None) -> None:
        if "trans" in step.parts:
            raise PtxFault(f"not modelled: {step.line}")
        registers, _ = self._vector(step, step.operands[0])
        for register, place in zip(registers, self._matrix_places(step, step.operands[1]), strict=True):
            self.put(register, self.shared[place[:, None] + np.arange(4)].view(U32)[:, 0], active)

    def do_stmatrix(self, step: Instruction, active: np.ndarray | None) -> None:
        if "trans" in step.parts:
            raise PtxFault(f"not modelled: {step.line}")
        registers, _ = self._vector(step, step.operands[1])
        for register, place in zip(registers, self._matrix_places(step, step.operands[0]), strict=True):
            self.shared[(place[:, None] + np.arange(4)).ravel()] = self.bits(register, 32).copy().view(U8)


def launch(kernel: Kernel, grid: Sequence[int], threads: int, arguments: Sequence, memory: Memory, shared: int) -> None:
    """Run every CTA of the grid in order; arguments: addresses (int), ints and floats in the kernel's order."""
    names = [name for _, name in kernel.parameters]
    padded = [*arguments, *[0] * (len(names) - len(arguments))]  # Triton appends scratch pointers
    values = {
        name: float(v) if kind.startswith("f") else v for (kind, name), v in zip(kernel.parameters, padded, strict=True)
    }
    values = {k: v if isinstance(v, float) else int(v) for k, v in values.items()}
    whole = (*grid, *[1] * (3 - len(grid)))
    for z in range(whole[2]):
        for y in range(whole[1]):
            for x in range(whole[0]):
                Cta(kernel, threads, memory, values, (x, y, z), whole, shared).run()
