"""The registers of a thread block in the PTX machine, and what arithmetic and data movement do to them."""

from __future__ import annotations

import functools
import re

import numpy as np
from ptx_memory import U8, U16, U32, U64, PtxFault
from ptx_parser import Instruction, Kernel

UNSIGNED = {8: U8, 16: U16, 32: U32, 64: U64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
WARP = 32


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, round to nearest even."""
    bits = x.view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(U16)
    return np.where(np.isnan(x), U16(0x7FFF), rounded)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x y + z rounded once (float64 products of float32 are exact; the sum's double rounding is negligible here)."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    return (x.astype(wide) * y.astype(wide) + z.astype(wide)).astype(x.dtype)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_COMPARE |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}
_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


class Registers:
    """Vectors over the threads of a block: operands in and out."""

    kernel: Kernel
    threads: int
    lanes: np.ndarray
    registers: dict[str, np.ndarray]

    def bits(self, operand: str, width: int) -> np.ndarray:
        """The operand as an unsigned vector of `width` bits."""
        kind = UNSIGNED[width]
        value = self.registers.get(operand)
        if value is None:
            if operand.startswith("%"):
                # left unwritten, say by a load whose guard is off: all ones, NaN to whoever uses it
                return np.full(self.threads, (1 << width) - 1, kind)
            if operand[:2] in ("0f", "0F", "0d", "0D"):
                number = int(operand[2:], 16)
            elif operand in self.kernel.labels or not re.fullmatch(r"-?(0x)?[0-9a-fA-F]+U?", operand):
                raise PtxFault(f"operand {operand} is not modelled")
            else:
                number = int(operand.rstrip("U"), 0)
            return np.full(self.threads, number & ((1 << width) - 1), kind)
        return value if value.dtype == kind else value.astype(kind)

    def number(self, operand: str, type_: str) -> np.ndarray:
        """The operand as a vector of the PTX type (`f32`, `s64`, `b16`, ...)."""
        width = int(type_[1:])
        raw = self.bits(operand, width)
        return raw.view({"f": FLOAT, "s": SIGNED}.get(type_[0], UNSIGNED)[width])

    def widened(self, operand: str, type_: str) -> np.ndarray:
        """A half-precision operand as float32."""
        if type_ == "bf16":
            return (self.bits(operand, 16).astype(U32) << U32(16)).view(np.float32)
        return self.number(operand, "f16").astype(np.float32)

    def predicate(self, operand: str) -> np.ndarray:
        if operand.startswith("!"):
            return ~self.predicate(operand[1:])
        if operand in ("0", "1", "-1"):
            return np.full(self.threads, operand != "0")
        return self.registers[operand]

    def put(self, register: str, value: np.ndarray, active: np.ndarray | None) -> None:
        """Write the bits of `value` where active."""
        if register == "_":
            return
        if value.dtype != np.bool_:
            value = np.ascontiguousarray(value).view(UNSIGNED[value.dtype.itemsize * 8])
        old = self.registers.get(register)
        if active is not None and not active.all():
            filler = np.zeros_like(value) if old is None else old.astype(value.dtype)
            value = np.where(active, value, filler)
        self.registers[register] = value

    def address(self, operand: str) -> np.ndarray:
        match = re.fullmatch(r"\[\s*([%\w.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if match is None:
            raise PtxFault(f"address {operand} is not modelled")
        base = self.registers[match[1]]
        return base.astype(np.int64) + int(match[2] or 0)


class Arithmetic(Registers):
    """Instructions that touch registers only."""

    def do_shfl(self, step: Instruction, active: np.ndarray | None) -> None:
        target, _, by = step.operands[0].partition("|")
        delta = self.number(step.operands[2], "s32").astype(np.int64)
        lane, warp = self.lanes % WARP, self.lanes // WARP * WARP
        source = {"bfly": lane ^ delta, "up": lane - delta, "down": lane + delta, "idx": delta & 31}[step.parts[2]]
        inside = (source >= 0) & (source < WARP)
        values = self.bits(step.operands[1], 32)
        self.put(target, values[warp + np.where(inside, source, lane)], active)
        if by:
            self.put(by, inside, active)

    def do_redux(self, step: Instruction, active: np.ndarray | None) -> None:
        type_ = step.parts[-1]
        values = self.number(step.operands[1], type_).reshape(-1, WARP)
        if "abs" in step.parts:
            values = np.abs(values)
        keep_nan = "NaN" in step.parts
        reduce = {
            "add": np.add.reduce,
            "and": np.bitwise_and.reduce,
            "or": np.bitwise_or.reduce,
            "xor": np.bitwise_xor.reduce,
            "max": (np.maximum if keep_nan else np.fmax).reduce,
            "min": (np.minimum if keep_nan else np.fmin).reduce,
        }[step.parts[2]]
        self.put(step.operands[0], np.repeat(reduce(values, axis=1), WARP).astype(values.dtype), active)

    def do_mov(self, step: Instruction, active: np.ndarray | None) -> None:
        target, source = step.operands
        if step.parts[-1] == "pred":
            return self.put(target, self.predicate(source), active)
        width = int(step.parts[-1][1:])
        if source.startswith("{"):
            pieces = [p.strip() for p in source.strip("{} ").split(",")]
            each = width // len(pieces)
            whole = np.zeros(self.threads, U64)
            for i, piece in enumerate(pieces):
                whole |= self.bits(piece, each).astype(U64) << U64(each * i)
            return self.put(target, whole.astype(UNSIGNED[width]), active)
        value = self.bits(source, width)
        if not target.startswith("{"):
            return self.put(target, value, active)
        pieces = [p.strip() for p in target.strip("{} ").split(",")]
        each = width // len(pieces)
        for i, piece in enumerate(pieces):
            part = (value.astype(U64) >> U64(each * i)) & U64((1 << each) - 1)
            self.put(piece, part.astype(U16 if each == 8 else UNSIGNED[each]), active)
        return None

    def do_selp(self, step: Instruction, active: np.ndarray | None) -> None:
        width = int(step.parts[-1][1:])
        yes, no, which = step.operands[1:4]
        self.put(step.operands[0], np.where(self.predicate(which), self.bits(yes, width), self.bits(no, width)), active)

    def do_setp(self, step: Instruction, active: np.ndarray | None) -> None:
        type_, name = step.parts[-1], step.parts[1]
        x, y = (self.number(o, type_) for o in step.operands[1:3])
        if type_[0] == "f":
            nan = np.isnan(x) | np.isnan(y)
            if name in ("nan", "num"):
                value = nan if name == "nan" else ~nan
            else:
                unordered = name.endswith("u")
                value = _COMPARE[name.removesuffix("u")](x, y)
                value = value | nan if unordered else value & ~nan
        else:
            value = _COMPARE[name](x, y)
        if len(step.operands) > 3:
            other = self.predicate(step.operands[3])
            value = {"and": value & other, "or": value | other, "xor": value ^ other}[step.parts[2]]
        target, _, complement = step.operands[0].partition("|")
        self.put(target, value, active)
        if complement:
            self.put(complement, ~value, active)

    def do_cvt(self, step: Instruction, active: np.ndarray | None) -> None:
        target, source = step.parts[-2], step.parts[-1]
        if target == "bf16x2":
            high, low = (bf16_bits(self.number(o, "f32")).astype(U32) for o in step.operands[1:3])
            return self.put(step.operands[0], (high << U32(16)) | low, active)
        if target == "f16x2":
            high, low = (self.number(o, "f32").astype(np.float16).view(U16).astype(U32) for o in step.operands[1:3])
            return self.put(step.operands[0], (high << U32(16)) | low, active)
        if target == "bf16":
            wide = self.number(step.operands[1], source).astype(np.float32)
            return self.put(step.operands[0], bf16_bits(wide), active)
        if source == "bf16":
            return self.put(step.operands[0], self.widened(step.operands[1], "bf16"), active)
        x = self.number(step.operands[1], source)
        if target[0] == "f":
            return self.put(step.operands[0], x.astype(FLOAT[int(target[1:])]), active)
        if source[0] == "f":
            rounding = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
            x = next(rounding[p] for p in step.parts if p in rounding)(x).astype(np.int64)
        width = int(target[1:])
        value = x.astype((SIGNED if target[0] == "s" else UNSIGNED)[width])
        return self.put(step.operands[0], value.astype(U16) if width == 8 else value, active)

    def do_prmt(self, step: Instruction, active: np.ndarray | None) -> None:
        low, high, select = (self.bits(o, 32) for o in step.operands[1:4])
        both = (high.astype(U64) << U64(32)) | low.astype(U64)
        out = np.zeros(self.threads, U32)
        for i in range(4):
            nibble = (select >> U32(4 * i)) & U32(15)
            byte = (both >> ((nibble & U32(7)).astype(U64) * U64(8))) & U64(255)
            byte = np.where(nibble & U32(8), np.where(byte & U64(128), U64(255), U64(0)), byte)  # sign replication
            out |= byte.astype(U32) << U32(8 * i)
        self.put(step.operands[0], out, active)

    def logic(self, step: Instruction, active: np.ndarray | None) -> None:
        x = [self.predicate(o) for o in step.operands[1:]]
        operation = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}
        self.put(step.operands[0], operation[step.parts[0]](*x), active)

    def packed(self, step: Instruction, active: np.ndarray | None) -> None:
        """Two float32 in 64 bits."""
        whole = [self.bits(o, 64) for o in step.operands[1:]]
        halves = []
        for shift in (0, 32):
            x = [((w >> U64(shift)) & U64(0xFFFFFFFF)).astype(U32).view(np.float32) for w in whole]
            result = fused(*x) if step.parts[0] == "fma" else _BINARY[step.parts[0]](*x)
            halves.append(result.astype(np.float32).view(U32).astype(U64))
        self.put(step.operands[0], halves[0] | (halves[1] << U64(32)), active)

    def float_arithmetic(self, step: Instruction, active: np.ndarray | None) -> None:
        root, type_ = step.parts[0], step.parts[-1]
        if step.parts[-2] == "f32" and type_ in ("bf16", "f16"):  # float32 arithmetic on half-precision inputs
            halves = 2 if root == "fma" else 1
            x = [self.widened(o, type_) for o in step.operands[1 : 1 + halves]]
            x += [self.number(o, "f32") for o in step.operands[1 + halves :]]
        else:
            x = [self.number(o, type_) for o in step.operands[1:]]
        if root in ("fma", "mad"):
            value = fused(*x)
        elif root in ("max", "min"):
            keep_nan = "NaN" in step.parts
            choose = {
                ("max", True): np.maximum,
                ("max", False): np.fmax,
                ("min", True): np.minimum,
                ("min", False): np.fmin,
            }[root, keep_nan]
            value = functools.reduce(choose, x)
        elif root == "copysign":
            value = np.copysign(x[1], x[0])
        elif len(x) == 1:
            value = _UNARY[root](x[0])
        else:
            value = _BINARY[root](*x)
        value = value.astype(x[0].dtype)
        if "ftz" in step.parts:
            tiny = np.finfo(np.float32).tiny
            value = np.where(np.abs(value) < tiny, np.copysign(np.float32(0), value), value)
        self.put(step.operands[0], value, active)

    def integer_arithmetic(self, step: Instruction, active: np.ndarray | None) -> None:
        root, type_ = step.parts[0], step.parts[-1]
        width = int(type_[1:])
        kind = UNSIGNED[width]
        if root in ("shl", "shr"):
            amount = self.bits(step.operands[2], 32)
            x = self.number(step.operands[1], type_)
            held = np.minimum(amount, width - 1).astype(x.dtype)
            value = x << held if root == "shl" else x >> held
            if type_[0] != "s":
                value = np.where(amount >= width, kind(0), value)
        elif root in ("mul", "mad"):
            value = self._product(step, type_, width)
        elif root == "lop3":
            x, y, z = (self.bits(o, 32) for o in step.operands[1:4])
            table = int(step.operands[4], 0)
            value = np.zeros(self.threads, U32)
            for i in range(8):
                if table >> i & 1:
                    value |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        elif root == "bfe":
            position, length = (self.bits(o, 32).astype(kind) for o in step.operands[2:4])
            value = (self.bits(step.operands[1], width) >> position) & ((kind(1) << length) - kind(1))
            if type_[0] == "s":  # the field's top bit is its sign
                sign = kind(1) << (length - kind(1))
                value = (value ^ sign) - sign
        elif root == "bfi":
            field, base = (self.bits(o, width) for o in step.operands[1:3])
            position, length = (self.bits(o, 32).astype(kind) for o in step.operands[3:5])
            mask = ((kind(1) << length) - kind(1)) << position
            value = (base & ~mask) | ((field << position) & mask)
        elif root in ("popc", "clz"):
            digits = [f"{int(x):0{width}b}" for x in self.bits(step.operands[1], width)]
            counts = [d.count("1") if root == "popc" else len(d) - len(d.lstrip("0")) for d in digits]
            value = np.array(counts, U32)
        elif root == "shf":
            low, high, amount = (self.bits(o, 32) for o in step.operands[1:4])
            both, by = (high.astype(U64) << U64(32)) | low.astype(U64), (amount & U32(31)).astype(U64)
            value = (((both << by) >> U64(32)) if step.parts[1] == "l" else (both >> by)).astype(U32)
        else:
            x = [self.number(o, type_) for o in step.operands[1:]]
            value = {
                "add": np.add,
                "sub": np.subtract,
                "and": np.bitwise_and,
                "or": np.bitwise_or,
                "xor": np.bitwise_xor,
                "not": np.invert,
                "neg": np.negative,
                "abs": np.abs,
                "max": np.maximum,
                "min": np.minimum,
                # PTX division truncates; np.fmod follows the sign of the dividend, as `rem` does
                "div": lambda a, b: (a - np.fmod(a, b)) // b,
                "rem": np.fmod,
            }[root](*x)
        self.put(step.operands[0], value.astype(value.dtype), active)

    def _product(self, step: Instruction, type_: str, width: int) -> np.ndarray:
        x, y = (self.number(o, type_) for o in step.operands[1:3])
        if "wide" in step.parts:
            wide = (SIGNED if type_[0] == "s" else UNSIGNED)[2 * width]
            value = x.astype(wide) * y.astype(wide)
            more = f"{type_[0]}{2 * width}"
        elif "hi" in step.parts:
            value = ((x.astype(object) * y.astype(object)) >> width).astype(x.dtype)
            more = type_
        else:
            value, more = x * y, type_
        return value + self.number(step.operands[3], more) if step.parts[0] == "mad" else value
