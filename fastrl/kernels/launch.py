"""Launch configurations: a table by (op, architecture, size class) in place of tuning at run time.

`launch_table.json` maps op -> architecture -> list of [largest size, configuration], sizes ascending, null = no limit.
Architecture is `sm_90`, `gfx942`, ...; `default` serves those without an entry, `interpret` the CPU interpreter (small
blocks, so that small inputs span several). `FASTRL_LAUNCH_TABLE=file` overlays entries, as `fastrl.kernels.tune` writes
them.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("launch_table.json")


@functools.cache
def table() -> dict[str, Any]:
    """The shipped table with the user's overlay."""
    entries = json.loads(TABLE.read_text())
    overlay = os.environ.get("FASTRL_LAUNCH_TABLE")
    if overlay:
        for op, by_arch in json.loads(Path(overlay).read_text()).items():
            entries.setdefault(op, {}).update(by_arch)
    return entries


@functools.cache
def _arch_of(kind: str, index: int) -> str:
    if kind != "cuda":
        return "interpret"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def arch_of(device: torch.device) -> str:
    """`sm_90`, `gfx942`, or `interpret` on a CPU."""
    return _arch_of(device.type, device.index if device.index is not None else 0)


def lookup(op: str, arch: str, size: int) -> dict[str, Any]:
    """The configuration of an op: constexprs (upper case) with num_warps and num_stages."""
    by_arch = table()[op]
    for limit, config in by_arch.get(arch, by_arch["default"]):
        if limit is None or size <= limit:
            return dict(config)
    raise KeyError(f"launch table: {op} has no entry for size {size} on {arch}")


def config(op: str, like: torch.Tensor, size: int | None = None) -> dict[str, Any]:
    """Launch configuration of `op` for tensor `like`: pass it as keywords to the kernel.

    Args:
        op: name in the table.
        like: a tensor on the device.
        size: what the size classes of the op count; None: elements of `like`.

    Returns:
        for example {"BLOCK": 1024, "num_warps": 4}.
    """
    return lookup(op, arch_of(like.device), like.numel() if size is None else size)
