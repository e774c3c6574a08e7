"""Ranks forked from a process of their own, which has never run autograd: their bodies may call backward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MAIN = """
import json, sys
sys.path[:0] = {paths!r}
import torch
{imports}
torch.set_num_threads(1)
from two_ranks import run_ranks
request = json.loads(sys.stdin.read())
print("\\nRESULT" + json.dumps([run_ranks(request["body"], size, request["timeout"]) for size in request["sizes"]]))
"""


def run_fresh(body: str, sizes: list[int], imports: str = "import fastrl.trainer.loop", timeout: float = 200.0) -> list[list[Any]]:
    """Runs `body` (source of a function of rank and size that ends in a return; JSON-able) on each number of ranks.

    `imports` is paid once, before the ranks are forked. Returns the results of all ranks for each size.
    """
    paths = [str(HERE), str(HERE.parent / "models"), str(HERE.parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", MAIN.format(paths=paths, imports=imports)],
        input=json.dumps({"body": body, "sizes": sizes, "timeout": timeout}),
        capture_output=True,
        text=True,
        timeout=timeout + 100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.split("\nRESULT")[-1])
