"""Runs the source of a function on several gloo ranks, forked from this process so that nothing is imported again."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(body: str, size: int = 2, timeout: float = 120.0) -> list[Any]:
    """Runs `body` (source of a function of rank and size that ends in a return; JSON-able) and gives all results.

    The ranks must not call backward: autograd's threads do not survive a fork.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _child(body, rank, size, folder)
            ranks[pid] = rank
        failed = _wait(ranks, time.monotonic() + timeout)
        outputs = [Path(folder, f"{rank}.json") for rank in range(size)]
        results = [json.loads(path.read_text()) if path.exists() else ["error", "no result"] for path in outputs]
    errors = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(results) if kind == "error"]
    assert not errors and not failed, "\n".join(errors)
    return [value for _, value in results]


def _child(body: str, rank: int, size: int, folder: str) -> None:
    code = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        scope: dict[str, Any] = {"torch": torch, "dist": dist}
        exec("def body(rank, size):\n" + "\n".join("    " + line for line in body.splitlines()), scope)
        outcome = ["ok", scope["body"](rank, size)]
        Path(folder, f"{rank}.json").write_text(json.dumps(outcome))
        dist.barrier()
        code = 0
    except BaseException:
        Path(folder, f"{rank}.json").write_text(json.dumps(["error", traceback.format_exc()]))
    os._exit(code)


def _wait(ranks: dict[int, int], deadline: float) -> bool:
    """Waits for all; when one fails the others get two seconds. True when one failed."""
    failed = False
    while ranks:
        pid, status = _reap(ranks)
        if pid in ranks:
            del ranks[pid]
            if os.waitstatus_to_exitcode(status) != 0 and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + 2.0)
        elif time.monotonic() > deadline:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.005)
    return failed


def _reap(ranks: dict[int, int]) -> tuple[int, int]:
    """One finished rank and its status, or (0, 0); other children of this process are left alone."""
    for pid in ranks:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return done, status
    return 0, 0
