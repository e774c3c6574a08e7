"""One exchange of sequences: every rank sends each of its sequences, with all its fields, to the rank that trains on it.

    table = gather_table(batch)                       # lengths and ids of all sequences, on every rank
    destination = ...                                 # [N] a rank per row of the table, the same on every rank
    batch, traffic = exchange(batch, table, destination)

One all-to-all moves the bytes of all fields, ragged: nothing is padded and no sizes travel, because every rank works
them out from the table. A prompt goes once to each rank that gets a sequence of its group. The identity at one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from fastrl.data.batch import SEQUENCE_FIELDS, RolloutBatch, concatenate, cu_seqlens_of
from fastrl.dist.collectives import all_gather_object, all_gather_rows, communication_device, rank, world_size

_MADE_ANEW = ("prompt_cu_seqlens", "cu_seqlens", "components")  # lengths travel, and components column by column
_COMPONENT = "component/"


@dataclass(frozen=True)
class SequenceTable:
    """The N sequences of all ranks, rank after rank: what an assignment may depend on. All [N] int64 on the CPU."""

    sample_id: Tensor
    group_id: Tensor
    prompt_length: Tensor  # tokens
    length: Tensor  # response tokens
    owner: Tensor  # rank that holds the sequence

    @property
    def num_bytes(self) -> int:
        """Size of the table, which every rank receives."""
        return 5 * 8 * self.owner.numel()


@dataclass(frozen=True)
class Traffic:
    """What one exchange moved, in bytes of this rank."""

    sent: int = 0  # to other ranks
    kept: int = 0  # the part that stayed
    table: int = 0  # received for the assignment


def gather_table(batch: RolloutBatch) -> SequenceTable:
    """Ids and lengths of the sequences of all ranks."""
    columns = [batch.sample_id, batch.group_id, batch.prompt_lengths[batch.group_index], batch.lengths]
    rows = torch.stack([*columns, torch.full_like(batch.sample_id, rank())], dim=1)
    return SequenceTable(*all_gather_rows(rows).cpu().unbind(1))


def exchange(
    batch: RolloutBatch, table: SequenceTable, destination: Tensor, *, num_copies: int = 1
) -> tuple[RolloutBatch, Traffic]:
    """This rank's sequences of the assignment, ordered by sample id (ties: by rank and place they come from).

    Args:
        batch: what this rank holds now.
        table: of all ranks.
        destination: [N] int64, per row of the table the number of the place that trains on it, equal on every rank.
        num_copies: consecutive ranks that form one place and each get all of its sequences (sequence parallelism).

    Returns:
        the new batch, and what moved.

    Raises:
        ValueError: the destinations do not fit the table or the ranks, or a field is there on some ranks only.
    """
    places = world_size() // num_copies
    if destination.numel() != table.owner.numel():
        raise ValueError(f"{destination.numel()} destinations for {table.owner.numel()} sequences")
    if destination.numel() and not 0 <= int(destination.min()) <= int(destination.max()) < places:
        raise ValueError(f"destinations {int(destination.min())}..{int(destination.max())} for {places} places")
    if world_size() == 1:
        return batch, Traffic()
    columns = schema(batch)
    device = communication_device()
    mine = destination[table.owner == rank()].to(batch.response_ids.device)
    parts = [to_bytes(batch.select((mine == q // num_copies).nonzero().squeeze(1)), columns) for q in range(world_size())]
    sent = [part.numel() for part in parts]
    here = destination == rank() // num_copies
    sizes = [Sizes.of(table, here & (table.owner == source)) for source in range(world_size())]
    received = [size.num_bytes(columns) for size in sizes]
    outgoing = torch.cat(parts).to(device)
    incoming = torch.empty(sum(received), dtype=torch.uint8, device=device)
    torch_dist.all_to_all_single(incoming, outgoing, received, sent)
    arrived = [from_bytes(chunk, size, columns) for chunk, size in zip(incoming.split(received), sizes)]
    whole = concatenate(arrived).to(batch.response_ids.device)
    order = torch.argsort(whole.sample_id, stable=True)
    return whole.select(order), Traffic(sum(sent) - sent[rank()], sent[rank()], table.num_bytes)


@dataclass(frozen=True)
class Column:
    """One field on the wire: what it has an entry for (prompt token, group, sequence, token), and its type."""

    name: str
    level: str  # prompt, group, sequence, token
    dtype: torch.dtype


@dataclass(frozen=True)
class Sizes:
    """Numbers of entries of a part of a batch."""

    prompt: int
    group: int
    sequence: int
    token: int

    @classmethod
    def of(cls, table: SequenceTable, rows: Tensor) -> Sizes:
        """The part made of the given rows [N] bool of the table; they have one owner."""
        groups, first = first_of_each(table.group_id[rows])
        return cls(
            prompt=int(table.prompt_length[rows][first].sum()),
            group=groups.numel(),
            sequence=int(rows.sum()),
            token=int(table.length[rows].sum()),
        )

    def num_bytes(self, columns: list[Column]) -> int:
        """Bytes of that many entries of every column."""
        return sum(getattr(self, c.level) * c.dtype.itemsize for c in columns)


def first_of_each(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids, ascending, and the first place [distinct] each stands at."""
    found, index = torch.unique(ids, return_inverse=True)
    first = torch.full((found.numel(),), ids.numel(), dtype=torch.int64)
    return found, first.scatter_reduce(0, index, torch.arange(ids.numel()), "amin")


def local_columns(batch: RolloutBatch) -> list[tuple[Column, Tensor]]:
    """Every field of a batch as a column with its values."""
    found: list[tuple[Column, Tensor]] = []

    def add(name: str, level: str, value: Tensor) -> None:
        found.append((Column(name, level, value.dtype), value))

    add("prompt_lengths", "group", batch.prompt_lengths)
    add("lengths", "sequence", batch.lengths)
    for f in fields(batch):
        value = getattr(batch, f.name)
        if value is None or f.name in _MADE_ANEW:
            continue
        per_sequence = f.name in SEQUENCE_FIELDS or f.name == "group_index"
        add(f.name, "prompt" if f.name == "prompt_ids" else "sequence" if per_sequence else "token", value)
    for name, value in sorted((batch.components or {}).items()):
        add(_COMPONENT + name, "sequence", value)
    return found


def schema(batch: RolloutBatch) -> list[Column]:
    """The columns of all ranks, the widest types first. A rank without sequences may lack some."""
    own = [column for column, _ in local_columns(batch)]
    union: dict[str, Column] = {}
    everywhere = all_gather_object((batch.num_sequences, own))
    for count, columns in everywhere:
        if count:
            union |= {c.name: c for c in columns}
    union = union or {c.name: c for c in own}
    for r, (count, columns) in enumerate(everywhere):
        lacking = sorted(set(union.values()) - set(columns), key=lambda c: c.name)
        if count and lacking:
            raise ValueError(f"rank {r} has no {lacking[0].name} of type {lacking[0].dtype}, other ranks do")
    return sorted(union.values(), key=lambda c: (-c.dtype.itemsize, c.name))


def to_bytes(batch: RolloutBatch, columns: list[Column]) -> Tensor:
    """All columns of a batch, one after another, as bytes [n] uint8."""
    values = {column.name: value for column, value in local_columns(batch)}
    empty = torch.zeros(0, dtype=torch.uint8, device=batch.response_ids.device)
    return torch.cat([values[c.name].contiguous().view(torch.uint8) if c.name in values else empty for c in columns])


def from_bytes(chunk: Tensor, sizes: Sizes, columns: list[Column]) -> RolloutBatch:
    """The batch that `to_bytes` was given."""
    values: dict[str, Any] = dict(_cut(chunk, sizes, columns))
    components = {n.removeprefix(_COMPONENT): values.pop(n) for n in list(values) if n.startswith(_COMPONENT)}
    return RolloutBatch(
        prompt_cu_seqlens=cu_seqlens_of(values.pop("prompt_lengths")),
        cu_seqlens=cu_seqlens_of(values.pop("lengths")),
        components=components,
        **values,
    )


def _cut(chunk: Tensor, sizes: Sizes, columns: list[Column]) -> Iterator[tuple[str, Tensor]]:
    place = 0
    for c in columns:
        size = getattr(sizes, c.level) * c.dtype.itemsize
        # a copy, because a view of another type must begin at a multiple of its size
        yield c.name, chunk[place : place + size].clone().view(c.dtype)
        place += size
