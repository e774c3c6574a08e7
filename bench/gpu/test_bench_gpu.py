"""With a GPU, `pytest bench/` also runs the scripts of this folder; each writes a line per case at once."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.harness.machine import machine_name
from bench.harness.peers import ROOT

HERE = Path(__file__).resolve().parent
SCRIPTS = [name for name in ("kernels", "step", "ipc") if (HERE / f"{name}.py").exists()]
LIMIT_S = 290


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: not measured on a GPU")
@pytest.mark.parametrize("script", SCRIPTS)
def test_script(script):
    """A wrong result is the script's exit code 1; its lines stay in bench/results."""
    name = f"{machine_name()}-{datetime.date.today().isoformat()}-{script}.jsonl"
    command = [sys.executable, str(HERE / f"{script}.py"), "--out", str(ROOT / "bench/results" / name)]
    assert subprocess.run(command, cwd=ROOT, timeout=LIMIT_S + 60).returncode == 0
