"""The engine's side of a weight delivery, in a process of its own: takes updates and copies them into its tensors.

    python bench/dist/weight_child.py shared_memory ADDRESS TOKEN    or    file FOLDER

One JSON line an update: the CPU seconds that this process spent on it. `keep` on standard input, before an update,
makes it save what it has to FOLDER/received.pt afterwards.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch


def shapes(folder: Path) -> dict[str, torch.Tensor]:
    """The engine's own tensors, zeros at first."""
    table = json.loads((folder / "shapes.json").read_text())
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in table.items()}


def take_shared_memory(receiver: Any, specs: list[Any], own: dict[str, torch.Tensor]) -> None:
    """One update through the staging buckets."""
    receiver.check_manifest(specs)
    for name, tensor in receiver.tensors():
        own[name].copy_(tensor)


def take_file(path: Path, own: dict[str, torch.Tensor]) -> None:
    """One update out of a file."""
    for name, tensor in torch.load(path, weights_only=True, mmap=True).items():
        own[name].copy_(tensor)


def main() -> None:
    """Take an update per line of standard input."""
    torch.set_num_threads(1)
    mode, folder, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    own = shapes(folder)
    receiver, specs = None, []
    if mode == "shared_memory":
        from fastrl.dist.weight_sync import TensorSpec, WeightReceiver

        receiver = WeightReceiver(*rest, timeout_s=120)
        specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in own.items()]
    for line in sys.stdin:
        start = time.process_time()
        if receiver is not None:
            take_shared_memory(receiver, specs, own)
        else:
            take_file(folder / "weights.pt", own)
        spent = time.process_time() - start
        if line.strip() == "keep":
            torch.save(own, folder / "received.pt")
        print(json.dumps({"cpu_s": spent}), flush=True)


if __name__ == "__main__":
    main()
