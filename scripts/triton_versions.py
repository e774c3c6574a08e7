"""Run the kernel tests against several versions of Triton: `python scripts/triton_versions.py [--versions 3.6.0]`.

Each version is installed without its dependencies into a folder of its own (kept under --folder), and the tests run
with that folder in front of the environment's packages. Only tests that compile, emulate or interpret kernels run.
Triton 3.6's interpreter cannot work with NumPy 2.4 and newer, so it gets an older NumPy beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
VERSIONS = "3.6.0,3.7.1,3.9.0"
BESIDE = {"3.6.0": ["numpy<2.4"]}
NEEDLES = ("kernel_target", "kernel_interpreter", "interpreter_runs")


def test_files() -> list[str]:
    """Test files that use Triton's compiler or interpreter."""
    files = sorted((REPOSITORY / "tests" / "kernels").glob("test_*.py"))
    return [str(f) for f in files if any(needle in f.read_text(encoding="utf-8") for needle in NEEDLES)]


def overlay(version: str, folder: Path) -> Path:
    """A folder with this Triton (and what it needs beside it), installed on first use."""
    place = folder / f"triton-{version}"
    if not (place / "triton").is_dir():
        packages = [f"triton=={version}", *BESIDE.get(version, [])]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *packages], check=True
        )
    return place


def run(version: str, folder: Path, extra: list[str]) -> int:
    """Exit code of the tests against one version."""
    place = overlay(version, folder)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(place), str(REPOSITORY)]),
        "TRITON_CACHE_DIR": str(place / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    check = "import numpy, triton; print('triton', triton.__version__, 'numpy', numpy.__version__)"
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-W", "ignore", *test_files(), *extra]
    code = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    print(f"triton {version}: exit code {code} after {time.perf_counter() - started:.0f} s", flush=True)
    return code


def main() -> int:
    """Run every version; 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default=VERSIONS, help=f"default {VERSIONS}")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".triton-versions")
    options, extra = parser.parse_known_args()
    codes = [run(version, options.folder, extra) for version in options.versions.split(",")]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
