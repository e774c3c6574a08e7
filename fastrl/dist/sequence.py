"""Process groups of sequence parallelism: consecutive ranks share micro-batches, ranks of the same place are compared."""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist

from fastrl.dist.collectives import rank, set_data_group, world_size
from fastrl.errors import ConfigError
from fastrl.models.sequence_parallel import SequenceGroup


def sequence_groups(size: int) -> SequenceGroup | None:
    """This rank's sequence group of `size` consecutive ranks; statistics are then taken over one rank of each group.

    None at size 1. Every rank calls it once. Consecutive ranks are on one node where `size` divides the ranks of a node,
    and their all-to-alls, four per layer and micro-batch with the backward pass, should stay there.

    Raises:
        ConfigError: the number of ranks is no multiple of `size`.
    """
    if size == 1:
        set_data_group(None)
        return None
    ranks = world_size()
    if ranks % size:
        raise ConfigError(
            f"parallel.sequence = {size} does not divide the {ranks} rank{'s' if ranks > 1 else ''} of this run: "
            "start a multiple of it, or lower parallel.sequence"
        )
    own: Any = None
    for first in range(0, ranks, size):
        group = torch_dist.new_group(list(range(first, first + size)))
        own = group if first <= rank() < first + size else own
    for place in range(size):
        group = torch_dist.new_group(list(range(place, ranks, size)))
        if rank() % size == place:
            set_data_group(group)
    return SequenceGroup(own, rank() % size, size)
