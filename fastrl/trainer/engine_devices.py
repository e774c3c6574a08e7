"""On which GPU an engine process runs: its trainer's own, or one of `rollout.devices`.

Numbers are those that the trainer sees: its ranks of one machine train on GPUs 0, 1, ... of these, engines may take any
other. With fewer devices than ranks several engines share one, with as much of its memory each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from fastrl.dist.collectives import world_size
from fastrl.dist.mesh import place
from fastrl.errors import ConfigError


def local_seat() -> tuple[int, int]:
    """Number of this rank on its machine, and how many ranks there are on it."""
    here = place()
    return (0, 1) if here is None else (here.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE") or world_size()))


def check_devices(devices: Sequence[int], *, local_size: int, present: int, tensor_parallel_size: int) -> None:
    """Raise ConfigError where `rollout.devices` names GPUs that are not there, that train, or too few for one engine.

    Args:
        devices: GPUs of the engines.
        local_size: ranks that train on this machine, on the first GPUs of it.
        present: GPUs that a process sees.
        tensor_parallel_size: GPUs that one engine needs.
    """
    given = f"rollout.devices = {list(devices)}"
    missing = [device for device in devices if not 0 <= device < present]
    if missing:
        raise ConfigError(f"{given}: there is no GPU {missing[0]}, this process sees {present} (CUDA_VISIBLE_DEVICES)")
    taken = [device for device in devices if device < local_size]
    if taken:
        raise ConfigError(
            f"{given}: GPU {taken[0]} trains, as do all below {local_size}: name others, or null to generate on those"
        )
    if len(set(devices)) < tensor_parallel_size:
        raise ConfigError(
            f"{given}: rollout.tensor_parallel_size = {tensor_parallel_size} needs as many different GPUs"
        )


def engine_device(devices: Sequence[int] | None, local_rank: int, own: int) -> int:
    """The GPU of this rank's engine, by the trainer's numbers."""
    return own if devices is None else devices[local_rank % len(devices)]


def engines_per_device(devices: Sequence[int] | None, local_size: int) -> int:
    """How many engine processes the busiest GPU holds."""
    return 1 if devices is None else -(-local_size // len(devices))


def engine_environment(device: int, tensor_parallel_size: int, visible: str | None) -> dict[str, str | None]:
    """Variables that put the engine process on a GPU.

    Alone it sees nothing else. Processes of one engine over several GPUs see all, so that they reach each other, and
    are told which is theirs.

    Args:
        device: number of the GPU among those that the trainer sees.
        tensor_parallel_size: processes of the engine.
        visible: CUDA_VISIBLE_DEVICES of the trainer; None or empty shows all.
    """
    if tensor_parallel_size > 1:
        return {"LOCAL_RANK": str(device)}
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[device].strip() if visible else str(device)}
