"""Where and with what something was measured, and the machine's own ceilings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.harness.calls import seconds
from bench.harness.peers import ROOT

PACKAGES = ("torch", "triton", "transformers", "numpy", "fastrl", "pytest-benchmark")


def cpu_model() -> str:
    """The processor's name."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def clock_mhz() -> float | None:
    """What the first core reports."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE)
    return float(found[1]) if found else None


def machine_name() -> str:
    """Short, for file names: the accelerator, or processor and number of cores."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = f"{cpu_model()} {os.cpu_count()}cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str]:
    """Of Python and the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, with a + when files differ from it."""
    short = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, cwd=ROOT)
    return short.stdout.strip() + ("+" if changed.stdout.strip() else "")


def ceilings(quick: bool = False) -> dict[str, float]:
    """Copy bandwidth (bytes/s, read + written) and matmul rates (flop/s) of one thread, the best of a few runs."""
    size, n = (2**22, 128) if quick else (2**27, 1024)
    source = torch.zeros(size, dtype=torch.uint8)
    target = torch.ones_like(source)
    found = {"copy_bytes_s": 2 * size / min(seconds(lambda: target.copy_(source)) for _ in range(4))}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        rate = 2 * n**3 / min(seconds(lambda a=a, b=b: a @ b) for _ in range(4))
        found[f"matmul_flops_{str(dtype).removeprefix('torch.')}"] = rate
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def describe() -> dict[str, Any]:
    """The context of a results file."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 if hasattr(os, "sysconf") else None
    return {
        "machine": machine_name(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1) if memory else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "clock_mhz": clock_mhz(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "command": " ".join(["pytest", *sys.argv[1:]]),
    }
