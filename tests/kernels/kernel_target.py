"""Kernel launches of a block of code, redirected to a GPU that is not there: compiled for it, and emulated.

    with on_target("cuda:90") as record:
        gae_triton(...)                       # CPU tensors: the emitted PTX runs on them
    with on_target("cuda:90", execute=False) as record:
        gae_triton(...)                       # meta tensors: compiled only

Launches are specialised as Triton's own launcher does it: pointers and integers that are multiples of 16, integers
equal to 1, None. The launch table is read for the target.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ptx_machine
import ptx_parser
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fastrl.kernels import dispatch, launch

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_GLOBAL_LOAD = re.compile(r"ld\.global(?:\.[a-z0-9_:]+)*?(?:\.v(\d))?\.[busf](\d+)")
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
# shared memory that a block may use
SHARED_LIMIT = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "cuda:100": 227 * 1024, "hip:gfx942": 64 * 1024}


def gpu_target(name: str) -> GPUTarget:
    """`cuda:90`, `hip:gfx942`."""
    backend, arch = name.split(":")
    return GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)


def arch_name(name: str) -> str:
    """The launch table's name of a target."""
    return name.replace("cuda:", "sm_").removeprefix("hip:")


@dataclass
class Launch:
    """One launch: the kernel, its constants and options, the compiled binary and the grid."""

    kernel: str
    constants: dict[str, Any]
    options: dict[str, Any]
    types: dict[str, str]
    compiled: Any
    grid: tuple[int, ...]
    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)

    @property
    def label(self) -> str:
        """Kernel with everything that selects its code."""
        shown = [f"{k}={v}" for k, v in self.constants.items() if k.isupper()]
        kinds = sorted({t for t in self.types.values() if t in ("*bf16", "*fp16")})
        return f"{self.kernel}[{','.join([*shown, *kinds])};warps={self.options.get('num_warps', 4)}]"


def _integer_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def specialise(function: JITFunction, arguments: dict[str, Any]) -> tuple[dict, dict, dict]:
    """(signature, constants, attributes) as Triton's launcher would choose them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        plain = parameter.do_not_specialize
        one = isinstance(value, int) and value == 1 and value is not True and not plain
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            aligned = value.device.type == "meta" or value.data_ptr() % 16 == 0
        elif isinstance(value, bool):
            signature[parameter.name], aligned = "i1", False
        elif isinstance(value, int):
            signature[parameter.name], aligned = _integer_type(value), value % 16 == 0 and not plain
        else:
            signature[parameter.name], aligned = "fp32", False
        if aligned and value is not None:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


@functools.cache
def _compile(function: JITFunction, frozen: tuple, target: str) -> Any:
    signature, constants, attributes, options = (dict(part) for part in frozen)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=gpu_target(target), options=options)


@functools.cache
def _parsed(ptx: str) -> ptx_parser.Kernel:
    return ptx_parser.parse(ptx)


class Freezable(list):
    """An attribute list that can be a cache key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def _run(
    record: list[Launch],
    target: str,
    execute: bool,
    extra: list,
    self: JITFunction,
    *args: Any,
    grid: Any,
    **kwargs: Any,
) -> Any:
    kwargs.pop("warmup", None)
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    names = [p.name for p in self.params]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    for parameter in self.params:
        if parameter.name not in arguments:
            arguments[parameter.name] = parameter.default
    signature, constants, attributes = specialise(self, arguments)
    frozen = (
        tuple(signature.items()),
        tuple(constants.items()),
        tuple((k, Freezable(v)) for k, v in attributes.items()),
        tuple(options.items()),
    )
    compiled = _compile(self, frozen, target)
    if callable(grid):
        grid = grid(arguments)
    kept = {k: v for k, v in constants.items() if self.params[names.index(k)].is_constexpr}
    entry = Launch(self.fn.__name__, kept, options, signature, compiled, tuple(grid))
    record.append(entry)
    if execute:
        tensors = [(n, arguments[n]) for n in names if isinstance(arguments[n], torch.Tensor)]
        memory = ptx_machine.Memory.of([*tensors, *extra])
        values = [
            arguments[n].data_ptr() if isinstance(arguments[n], torch.Tensor) else arguments[n]
            for n in names
            if signature[n] != "constexpr"
        ]
        meta = compiled.metadata
        ptx_machine.launch(_parsed(compiled.asm["ptx"]), grid, meta.num_warps * 32, values, memory, meta.shared)
        entry.loads, entry.stores = memory.loads, memory.stores
    return compiled


@contextlib.contextmanager
def on_target(target: str, *, execute: bool = True, extra: list | None = None):
    """Redirect launches to `target`; yields the list of launches. `extra`: (name, tensor) reached by address only."""
    record: list[Launch] = []
    more = [] if extra is None else extra

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        return _run(record, target, execute, more, self, *args, **kwargs)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(launch, "arch_of", lambda device: arch_name(target)),
        mock.patch.object(dispatch, "interpreting", lambda: True),
        mock.patch.dict(os.environ, {"FASTRL_KERNELS": "triton"}),
    ):
        yield record


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _cuda_resources(compiled: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {k.lower(): int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    # ptxas keeps spilled registers on the stack, and these kernels have no other use for one
    return {"registers": found["reg"], "spill_bytes": found["stack"] + found["local"]}


def _hip_resources(compiled: Any) -> dict[str, int]:
    text = compiled.asm["amdgcn"]

    def value(pattern: str) -> int:
        match = re.search(pattern + r":\s+(\d+)", text)
        return int(match[1]) if match else 0

    return {
        "registers": value(r"\.vgpr_count"),
        "spill_bytes": 4 * value(r"\.vgpr_spill_count") + value(r"\.private_segment_fixed_size"),
    }


def resources(entry: Launch, target: str) -> dict[str, int]:
    """Registers a thread, spilled bytes, shared memory, and the widest global load, in bytes."""
    if target.startswith("cuda"):
        found = _cuda_resources(entry.compiled)
        widths = [
            int(n or 1) * int(bits) // 8
            for n, bits in re.findall(
                r"ld\.global(?:\.[a-z0-9_:]+)*?(?:\.v(\d))?\.[busf](\d+)", entry.compiled.asm["ptx"]
            )
        ]
    else:
        found = _hip_resources(entry.compiled)
        words = re.findall(r"(?:global|buffer)_load_dwordx?(\d?)", entry.compiled.asm["amdgcn"])
        widths = [4 * int(w or 1) for w in words]
    return found | {"shared": entry.compiled.metadata.shared, "widest_load": max(widths, default=0)}
