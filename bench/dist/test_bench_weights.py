"""New weights for an engine in another process: bytes copied and CPU time of both ends, against a file in memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.harness.calls import seconds
from bench.harness.measure import Case
from bench.harness.peers import ROOT
from fastrl.dist.weight_sync import WeightSender

HIDDEN, VOCABULARY, LAYERS = 576, 49152, 8


class Policy(nn.Module):
    """The matrices of a small Llama."""

    def __init__(self, hidden: int, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        sizes = [(hidden, hidden)] * 2 + [(hidden // 3, hidden)] * 2 + [(hidden * 8 // 3, hidden)] * 2
        shapes = [*sizes, (hidden, hidden * 8 // 3)] * layers
        self.matrices = nn.ParameterList(torch.randn(shape) for shape in shapes)


class Delivery:
    """One way to an engine's process; a call is one update, and its time is that of both ends."""

    clock = "process"

    def __init__(self, model: nn.Module, mode: str, verify: str = "always") -> None:
        self.model, self.mode, self.verify = model, mode, verify
        self.folder = Path(tempfile.mkdtemp(prefix="bench_", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        shapes = {name: list(p.shape) for name, p in model.named_parameters()}
        (self.folder / "shapes.json").write_text(json.dumps(shapes))
        self.sender = None
        if mode == "shared_memory":
            self.sender = WeightSender(model, transport=mode, dtype=torch.bfloat16, verify=verify)
        rest = [self.sender.address, self.sender.token] if self.sender else []
        command = [sys.executable, str(ROOT / "bench/dist/weight_child.py"), mode, str(self.folder), *map(str, rest)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.version = 0

    def send(self) -> None:
        """This end of an update."""
        if self.sender is not None:
            self.sender.send(self.version)
        else:
            torch.save({n: p.detach().bfloat16() for n, p in self.model.named_parameters()}, self.folder / "weights.pt")

    def update(self, word: str) -> float:
        """CPU seconds of both ends of an update."""
        assert self.child.stdin and self.child.stdout
        self.version += 1
        mine = 0.0
        if self.sender is None:
            mine = seconds(self.send)
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        if self.sender is not None:
            mine = seconds(self.send)
        line = self.child.stdout.readline()
        assert line, f"the engine's process ended with code {self.child.wait()}"
        return mine + json.loads(line)["cpu_s"]

    def result(self) -> tuple[list[torch.Tensor], float]:
        taken = self.update("keep")
        own = torch.load(self.folder / "received.pt", weights_only=True)
        return [own[name] for name, _ in self.model.named_parameters()], taken

    def seconds(self, loops: int) -> float:
        return sum(self.update("update") for _ in range(loops)) / loops

    def peak_bytes(self) -> None:
        return None

    def close(self) -> None:
        assert self.child.stdin
        self.child.stdin.close()
        if self.sender is not None:
            self.sender.close()
        self.child.terminate()
        self.child.wait(timeout=20)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory by descriptor needs Linux")
def test_weight_delivery(bench, smoke):
    torch.manual_seed(0)
    model = Policy(*((24, 128, 2) if smoke else (HIDDEN, VOCABULARY, LAYERS)))
    count = sum(p.numel() for p in model.parameters())
    bench(
        Case(
            f"weights {count / 1e6:.0f}M fp32 -> bf16, another process",
            {
                "fastrl": Delivery(model, "shared_memory"),
                "fastrl, no checksums": Delivery(model, "shared_memory", verify="off"),
                "file in memory": Delivery(model, "file"),
            },
            expected=lambda: [p.detach().bfloat16() for p in model.parameters()],
            tolerance=0.0,
            notes=dict.fromkeys(("fastrl", "fastrl, no checksums", "file in memory"), {"mib": round(2 * count / 2**20, 1)}),
        )
    )
