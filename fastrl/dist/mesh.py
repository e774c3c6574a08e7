"""The process group of a run: who takes part, how they meet, and the mesh that sharding works on.

`fastrl train` (fastrl.dist.launch) and torchrun leave the same environment variables, so a rank starts the same way
under both. gloo serves the CPU; on GPUs NCCL carries device tensors and gloo the CPU's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastrl.dist.collectives import world_size
from fastrl.dist.failure import Whereabouts
from fastrl.errors import ConfigError, ProcessError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Where this process stands among all."""

    rank: int
    size: int
    local_rank: int  # number on its machine, and of its GPU

    @property
    def name(self) -> str:
        """Machine and process id, for messages."""
        return f"{socket.gethostname()} pid {os.getpid()}"


def place() -> Place | None:
    """What the launcher said in the environment; None in a process that no launcher started."""
    if not all(name in os.environ for name in VARIABLES):
        return None
    rank, size, local_rank = (int(os.environ[name]) for name in VARIABLES[:3])
    return Place(rank, size, local_rank)


def local_device(device: torch.device) -> torch.device:
    """The device of this rank: `cuda` becomes the GPU with the number of the rank on its machine."""
    here = place()
    if device.type != "cuda" or device.index is not None or here is None:
        return device
    return torch.device("cuda", here.local_rank)


@contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[dist.Store | None]:
    """The default process group of this rank while the block runs; yields the store that all ranks share.

    Args:
        device: where the tensors live; a GPU must be this rank's own (`local_device`).
        timeout_s: how long to wait for a rank to join, and in every collective, in seconds.

    Raises:
        ConfigError: the port is in use, or there are fewer GPUs than ranks on this machine.
        ProcessError: a rank did not join in time (names it).
    """
    here = place()
    if here is None:
        yield None
        return
    if device.type == "cuda":
        check_gpu(here, device)
        torch.cuda.set_device(device)
    store = meet(here, timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=here.rank,
        world_size=here.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield store
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def check_gpu(here: Place, device: torch.device) -> None:
    """Refuse a rank without a GPU of its own."""
    number = torch.cuda.device_count()
    if device.index is not None and device.index >= number:
        raise ConfigError(
            f"rank {here.rank} is process {here.local_rank} on {socket.gethostname()}, which has {number} GPUs: "
            "start one process per GPU (parallel.processes, or torchrun --nproc-per-node)"
        )


def meet(here: Place, timeout_s: float) -> dist.Store:
    """The store of all ranks, once every one has joined; names those that have not when the time is over."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    address = f"{host}:{port}"
    limit = timedelta(seconds=timeout_s)
    try:
        # Under a launcher that keeps the store itself every rank is its client, otherwise rank 0 serves it.
        serves = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        server = dist.TCPStore(host, int(port), is_master=serves, wait_for_workers=False, timeout=limit)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise ConfigError(
                f"the port of {address} is in use: choose another (MASTER_PORT, or torchrun --rdzv-endpoint)"
            ) from error
        raise ProcessError(f"rank {here.rank} could not reach {address} within {timeout_s:g} s: {error}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted group must not read the old one's keys
    store = dist.PrefixStore(f"fastrl/{attempt}", server)
    key = "joined/{}"
    store.set(key.format(here.rank), here.name)
    try:
        for rank in range(here.size):
            store.wait([key.format(rank)], limit)
    except (dist.DistStoreError, RuntimeError) as error:
        missing = [rank for rank in range(here.size) if not store.check([key.format(rank)])]
        lost = ProcessError(
            f"rank {', '.join(map(str, missing))} of {here.size} did not join at {address} within {timeout_s:g} s "
            "(parallel.timeout_s): look at the output of its machine, and whether it reaches this address"
        )
        lost.__cause__ = error  # by which the launcher sees that the fault is another rank's
        Whereabouts(store, here.rank, here.size).report(lost)
        raise lost
    return store


def mesh_shape(size: int, replicate: int | None, shard: int | None) -> tuple[int, int]:
    """(replicate, shard) for `size` ranks; None takes what the other leaves, and both None shard over all.

    Raises ConfigError when they do not make up `size`.
    """
    copies = replicate or (1 if shard is None else max(1, size // shard))
    ranks = shard or max(1, size // copies)
    if copies * ranks != size:
        given = {"parallel.replicate": replicate, "parallel.shard": shard}
        product = " x ".join(f"{key} = {value}" for key, value in given.items() if value is not None)
        divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ConfigError(
            f"{product} does not divide {size} processes: each must be a divisor of {size} ({divisors}) and their "
            "product the number of processes; null takes what the other leaves"
        )
    return copies, ranks


def make_mesh(device: torch.device, replicate: int | None, shard: int | None) -> DeviceMesh | None:
    """The mesh (replicate, shard) over all ranks, or None for one rank. Raises ConfigError as `mesh_shape` does."""
    shape = mesh_shape(world_size(), replicate, shard)
    if world_size() == 1:
        return None
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
