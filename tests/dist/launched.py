"""Runs the source of a function on several gloo ranks started by the launcher; backward passes are fine here.

Slower than `two_ranks.run_ranks` by an import of torch per rank, so put what belongs together into one body.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fastrl.dist.launch import SHOW_STACK, launch

TESTS = Path(__file__).resolve().parents[1]
_BOOT = """
import json, sys
sys.path[:0] = {paths}
import torch, torch.distributed as dist
from fastrl.dist.failure import Whereabouts, reporting
from fastrl.dist.launch import die_with_launcher
from fastrl.dist.mesh import process_group
die_with_launcher()
{before}
torch.set_num_threads(1)
with process_group(torch.device("cpu"), {timeout_s}) as store:
    rank, size = dist.get_rank(), dist.get_world_size()
    with reporting(Whereabouts(store, rank, size)):
        scope = {{"torch": torch, "dist": dist}}
        exec({source!r}, scope)
        store.set(f"result/{{rank}}", json.dumps(scope["body"](rank, size)))
"""


def launch_body(body: str, size: int, *, timeout_s: float = 60.0, before: str = "") -> list[Any]:
    """Runs `body` (source of a function of rank and size that ends in a return; JSON-able) and gives all results.

    `before` is run by each rank before it joins the others.
    """
    source = "def body(rank, size):\n" + "\n".join("    " + line for line in body.splitlines())
    paths = [str(TESTS.parent), *(str(TESTS / room) for room in ("models", "dist", "trainer"))]
    code = SHOW_STACK + _BOOT.format(paths=paths, timeout_s=timeout_s, source=source, before=before)
    store = launch([sys.executable, "-c", code], size, timeout_s=timeout_s)
    return [json.loads(store.get(f"result/{rank}")) for rank in range(size)]
