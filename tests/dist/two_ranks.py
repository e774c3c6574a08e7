"""Runs a function of a test module on two gloo ranks and returns what each printed as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PRELUDE = """
import json, os, sys
import torch
import torch.distributed as dist
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
def body(rank, size):
{body}
print("RESULT " + json.dumps(body(rank, size)))
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(body: str, size: int = 2, timeout: float = 120.0) -> list:
    """Runs `body` (source of a function of rank and size that ends in a return) on `size` ranks; their results."""
    source = PRELUDE.format(body="\n".join("    " + line for line in body.splitlines()))
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", source]
        ranks = [
            subprocess.Popen(
                [*command, str(r), str(size), f"{folder}/store"],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(size)
        ]
        try:
            outputs = [process.communicate(timeout=timeout) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    for process, (out, err) in zip(ranks, outputs):
        assert process.returncode == 0, f"{out}\n{err}"
    return [json.loads(out.rsplit("RESULT ", 1)[1]) for out, _ in outputs]
