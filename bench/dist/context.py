"""What every measurement of this folder says about where it was made."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent


def context(command: str) -> dict[str, Any]:
    """Versions, commit, machine and the command."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout
    return {
        "command": command,
        "commit": commit.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "backend": "gloo",
    }


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the result, and write it where `--out` says."""
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
