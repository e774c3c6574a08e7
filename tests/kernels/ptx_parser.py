"""PTX text as Triton emits it -> a list of decoded instructions and the labels between them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class Instruction:
    opcode: str
    parts: tuple[str, ...]  # opcode split at the dots
    operands: tuple[str, ...]
    guard: str | None = None  # predicate register
    negated: bool = False
    line: str = ""


@dataclass
class Kernel:
    name: str
    parameters: list[tuple[str, str]]  # (type, name) in order
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # name -> labels of an indexed branch


_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_TABLE = re.compile(r"(\$?[\w$]+):\s*\.branchtargets\s+(.*)", re.S)


def _statements(body: str):
    """Yield labels (ending in ':') and statements; inline-asm scopes and directives are dropped."""
    held = ""
    # newer compilers put the label of a branch table on a line of its own
    for raw in re.sub(r":\s*\n\s*(\.branchtargets)", r": \1", body).splitlines():
        line = raw.split("//")[0].strip()
        if not line or (not held and line.startswith(".")):
            continue
        if not held and re.fullmatch(r"\$?[\w$.]+:", line):
            yield line
            continue
        held = f"{held} {line}".strip()
        while True:
            # a brace that opens a scope (not a vector operand) has nothing before it
            held = re.sub(r"^[{}]\s*(?=$|[@a-z.}{])", "", held)
            if ";" not in held:
                break
            statement, held = (part.strip() for part in held.split(";", 1))
            if statement and not statement.startswith("."):
                yield statement


def parse(ptx: str) -> Kernel:
    """The first (only) entry of the text."""
    text = ptx[ptx.index(".visible .entry") :]
    header, body = text[: text.index("{")], text[text.index("{") + 1 :]
    body = body.split("\n\t.section")[0]
    name = re.search(r"\.entry\s+([\w$]+)", header)
    assert name is not None
    kernel = Kernel(name[1], re.findall(r"\.param \.(\w+)[^,\n)]*?\b(\w+_param_\d+)", header))
    for statement in _statements(body):
        if statement.endswith(":"):
            kernel.labels[statement[:-1]] = len(kernel.code)
            continue
        table = _TABLE.fullmatch(statement)
        if table is not None:
            kernel.tables[table[1]] = [label.strip() for label in table[2].split(",")]
            continue
        match = _STATEMENT.fullmatch(statement)
        if match is None:
            raise ValueError(f"cannot parse PTX statement: {statement}")
        negated, guard, opcode, rest = match.groups()
        operands = tuple(o.strip() for o in _OPERAND.findall(rest))
        kernel.code.append(Instruction(opcode, tuple(opcode.split(".")), operands, guard, negated == "!", statement))
    return kernel
