"""Saving and loading a checkpoint of a model with its moments: seconds, and bytes on disk against the payload.

    python bench/dist/checkpoint.py --model DIR [--ranks 1 2] [--rounds 3] [--out FILE]

The payload is weights and two moments in float32. On several ranks the tensors are sharded by rows. Loading checks every
file's checksum first. Nothing is timed before a loaded checkpoint equals what was saved. Times are those of the slowest
rank; `copy` is the time to write the payload's bytes to a file of the same disk and sync it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from context import context, show
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastrl.dist.checkpoint import CheckpointManager, load_checkpoint
from fastrl.dist.collectives import barrier
from fastrl.models.load import load_model


def tensors_of(model: torch.nn.Module, size: int) -> dict[str, Any]:
    """Weights and moments, sharded over the ranks."""
    mesh = init_device_mesh("cpu", (size,))

    def make(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value.detach(), mesh, [Shard(0)]) if size > 1 else value.detach().clone()

    weights = {name: make(p) for name, p in model.named_parameters()}
    moments = {name: {"exp_avg": p * 0.5, "exp_avg_sq": p * p} for name, p in weights.items()}
    return {"policy": {"model": weights, "optimizer": moments}}


def one_rank(path: str, folder: str, rounds: int, rank: int, size: int) -> dict[str, Any]:
    """Times of this rank."""
    model = load_model(path)
    tensors = tensors_of(model, size)
    payload = 3 * 4 * sum(p.numel() for p in model.parameters())
    del model
    manager = CheckpointManager(f"{folder}/{size}", keep_last=1)
    saves, loads, copies = [], [], []
    for number in range(rounds):
        barrier()
        started = time.perf_counter()
        saved = manager.save(number + 1, tensors, {"step": number})
        saves.append(time.perf_counter() - started)
        template = {"policy": {kind: _zeros(tree) for kind, tree in tensors["policy"].items()}}
        barrier()
        started = time.perf_counter()
        loaded, _ = load_checkpoint(saved, template)
        loads.append(time.perf_counter() - started)
        name = next(iter(tensors["policy"]["model"]))
        a, b = loaded["policy"]["model"][name], tensors["policy"]["model"][name]
        assert torch.equal(a.to_local() if size > 1 else a, b.to_local() if size > 1 else b)
        del template, loaded
        if rank == 0:
            copies.append(copy_seconds(Path(folder) / "copy", payload))
    size_on_disk = sum(f.stat().st_size for f in saved.rglob("*") if f.is_file())
    return {"save_s": sorted(saves), "load_s": sorted(loads), "copy_s": copies, "disk": size_on_disk, "payload": payload}


def _zeros(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: _zeros(v) if isinstance(v, dict) else torch.zeros_like(v) for k, v in tree.items()}


def copy_seconds(path: Path, count: int) -> float:
    """Seconds to write and sync `count` bytes."""
    block = memoryview(bytearray(os.urandom(1 << 20)) * 16)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, count, len(block)):
            file.write(block[: min(len(block), count - start)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows = run_ranks(
                lambda rank, ranks, folder=folder: one_rank(options.model, folder, options.rounds, rank, ranks), size
            )
        first, middle = rows[0], options.rounds // 2
        save, load = max(r["save_s"][middle] for r in rows), max(r["load_s"][middle] for r in rows)
        copy = sorted(first["copy_s"])[middle]
        cases.append({
            "ranks": size,
            "payload": first["payload"],
            "disk / payload": round(first["disk"] / first["payload"], 5),
            "save_s": round(save, 3),
            "load_s": round(load, 3),
            "copy_s": round(copy, 3),
            "save / copy": round(save / copy, 2),
        })  # fmt: skip
    command = f"python bench/dist/checkpoint.py --model {Path(options.model).name} --rounds {options.rounds}"
    show({"context": context(command), "cases": cases}, options)


if __name__ == "__main__":
    main()
