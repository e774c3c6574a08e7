"""Runs a function on several gloo ranks of this machine, one thread each, and collects what it returns."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(function: Callable[[int, int], Any], size: int) -> list[Any]:
    """`function(rank, size)` on each of `size` forked processes; results must be JSON-able.

    The caller has not run autograd before: its threads do not survive a fork.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _child(function, rank, size, folder)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def _child(function: Callable[[int, int], Any], rank: int, size: int, folder: str) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        Path(folder, f"{rank}.json").write_text(json.dumps(function(rank, size)))
        dist.barrier()
        code = 0
    finally:
        os._exit(code)
