"""A process that holds another trainer's functions: it makes, checks and times them when asked.

Run by `bench.harness.peers` with the interpreter that has the peer. One JSON request a line on standard input, one
JSON answer a line with the request's number; tensors go through files. Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from bench.harness.calls import checked, peak_bytes, seconds


class Worker:
    """The functions that were made, by key."""

    def __init__(self) -> None:
        self.made: dict[str, Callable[[], Any]] = {}
        self.inputs: tuple[str, dict[str, Any]] = ("", {})

    def find(self, module: str, distribution: str) -> dict[str, Any]:
        """The version of a peer, None where it is not installed."""
        if importlib.util.find_spec(module) is None:
            return {"version": None}
        for name in (distribution, f"{distribution}-cpu"):
            try:
                return {"version": importlib.metadata.version(name)}
            except importlib.metadata.PackageNotFoundError:
                continue
        return {"version": "unknown"}

    def make(self, key: str, function: str, inputs: str, options: dict[str, Any]) -> dict[str, Any]:
        """Build `module:function` on the tensors of a file."""
        if self.inputs[0] != inputs:
            self.inputs = (inputs, torch.load(inputs, weights_only=True) if inputs else {})
        module, _, name = function.partition(":")
        self.made[key] = getattr(importlib.import_module(module), name)(self.inputs[1], **options)
        return {}

    def result(self, key: str, path: str, clock: str) -> dict[str, Any]:
        """Call once and leave the tensors in a file."""
        found, taken = checked(self.made[key], clock)
        torch.save(found, path)
        return {"seconds": taken}

    def time(self, key: str, loops: int, clock: str) -> dict[str, Any]:
        return {"seconds": seconds(self.made[key], loops, clock)}

    def peak(self, key: str) -> dict[str, Any]:
        return {"bytes": peak_bytes(self.made[key])}

    def drop(self, key: str) -> dict[str, Any]:
        self.made.pop(key, None)
        self.inputs = ("", {})
        return {}


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        number = request.pop("number")
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as failure:  # one function's failure must not end the peer
            answer = {"failed": f"{type(failure).__name__}: {failure}"[:500]}
        print(json.dumps(answer | {"number": number}), file=answers, flush=True)


if __name__ == "__main__":
    main()
