"""One micro-batch over several ranks (Ulysses): rows are split for everything but attention, heads are split for it.

    rank j of k holds rows j, j + k, j + 2k, ... of the stream        (embedding, norms, products, head)
    all-to-all:  its rows of all heads   ->  all rows of its heads
    attention over the whole stream, prefix tree and all, for its heads
    all-to-all:  all rows of its heads   ->  its rows of all heads

Rows are dealt like cards, so that prompt rows, which the head does not need, and response rows fall evenly on the
ranks. A head row and its label live where the row lives that predicts it. Query heads are dealt in k runs as equal as
can be; a rank gets the key/value heads that its query heads read, so with fewer of them than ranks some are held twice,
and their gradients are summed on the way back. Each rank's gradient is that of its rows: the sum over ranks is the
whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from fastrl.errors import ModelError
from fastrl.models.attention import AttentionLayout


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share micro-batches. `group` is their torch process group."""

    group: Any
    rank: int  # 0 .. size - 1
    size: int

    def count(self, num_rows: int, rank: int) -> int:
        """Rows of `rank` in a stream of `num_rows`."""
        return (num_rows - rank + self.size - 1) // self.size

    def own(self, rows: Tensor) -> Tensor:
        """This rank's entries of a tensor whose first dimension is the stream."""
        return rows[self.rank :: self.size]

    def owned(self, index: Tensor) -> Tensor:
        """For row numbers [N], whether the row is this rank's."""
        return index % self.size == self.rank

    def local(self, index: Tensor) -> Tensor:
        """Row numbers of owned rows -> their places among this rank's rows."""
        return index // self.size


class Heads(NamedTuple):
    """The heads that one rank computes: a run of query heads, and for its local attention the key/value heads."""

    first: int
    end: int
    key_heads: tuple[int, ...]  # one per group of query heads that share it

    @property
    def num_query(self) -> int:
        return self.end - self.first


def deal_heads(num_query: int, num_key: int, size: int) -> list[Heads]:
    """Query heads in `size` runs that differ by at most one, with the key/value heads each run reads.

    Where a run reads its key/value heads unequally often each query head gets a copy of its own.

    Raises:
        ModelError: there are fewer query heads than ranks.
    """
    if num_query < size:
        raise ModelError(
            f"parallel.sequence = {size}: the model has {num_query} attention heads, and each of the ranks needs one"
        )
    repeats = num_query // num_key
    borders = [num_query * i // size for i in range(size + 1)]
    dealt = []
    for first, end in pairwise(borders):
        read = [head // repeats for head in range(first, end)]
        distinct = sorted(set(read))
        even = len({read.count(head) for head in distinct}) == 1
        dealt.append(Heads(first, end, tuple(distinct if even else read)))
    return dealt


class _AllToAll(torch.autograd.Function):
    """Flat pieces to ranks; the gradient of a piece comes back the way it went."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes = (sent, received, group)
        out = flat.new_empty(sum(received))
        torch_dist.all_to_all_single(out, flat, received, sent, group=group)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        back = grads[0].new_empty(sum(sent))
        torch_dist.all_to_all_single(back, grads[0].contiguous(), sent, received, group=group)
        return back, None, None, None


class SequenceParallelLayout:
    """A layout of the whole stream, seen by a rank that holds some of its rows.

    Args:
        layout: who attends to whom in the stream of `num_rows` rows.
        num_rows: U, of the whole stream.
        ranks: the ranks that share it.
    """

    def __init__(self, layout: AttentionLayout, num_rows: int, ranks: SequenceGroup) -> None:
        self.layout, self.num_rows, self.ranks = layout, num_rows, ranks
        order = torch.cat([torch.arange(r, num_rows, ranks.size) for r in range(ranks.size)])
        self.order = order  # the stream's rows as they arrive, rank after rank
        self.places = torch.argsort(order)
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [1, Hq, U', D], key and value [1, Hkv, U', D] of this rank's U' rows -> [1, U', Hq, D]."""
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        dealt = deal_heads(query.shape[1], key.shape[1], self.ranks.size)
        mine = dealt[self.ranks.rank]
        q, k, v = self.gather(query.to(dtype), key.to(dtype), value.to(dtype), dealt)
        out = self.layout.attend(
            module,
            q,
            k,
            v,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=None if sinks is None else sinks[mine.first : mine.end],
        )
        return self.scatter(out, dealt)

    def gather(self, query: Tensor, key: Tensor, value: Tensor, dealt: list[Heads]) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of all heads -> all rows of its heads: [1, heads, U, D] each, in one exchange."""
        ranks, rows, dims = self.ranks, query.shape[2], (query.shape[3], key.shape[3], value.shape[3])
        pieces = []
        for heads in dealt:
            index = torch.tensor(heads.key_heads, device=key.device)
            q = query[0, heads.first : heads.end].transpose(0, 1).reshape(rows, heads.num_query * dims[0])
            k = key[0].index_select(0, index).transpose(0, 1).reshape(rows, len(heads.key_heads) * dims[1])
            v = value[0].index_select(0, index).transpose(0, 1).reshape(rows, len(heads.key_heads) * dims[2])
            pieces.append(torch.cat([q, k, v], dim=1).flatten())
        mine = dealt[ranks.rank]
        widths = [mine.num_query * dims[0], len(mine.key_heads) * dims[1], len(mine.key_heads) * dims[2]]
        received = [ranks.count(self.num_rows, r) * sum(widths) for r in range(ranks.size)]
        flat = _AllToAll.apply(torch.cat(pieces), [p.numel() for p in pieces], received, ranks.group)
        stream = flat.view(self.num_rows, sum(widths)).index_select(0, self._indices(query.device)[1])
        parts = stream.split(widths, dim=1)
        q, k, v = (
            part.unflatten(1, (count, dim)).transpose(0, 1)[None]
            for part, count, dim in zip(parts, (mine.num_query, len(mine.key_heads), len(mine.key_heads)), dims)
        )
        return q, k, v

    def scatter(self, out: Tensor, dealt: list[Heads]) -> Tensor:
        """All rows of this rank's heads [1, U, heads, Dv] -> its rows of all heads [1, U', Hq, Dv]."""
        ranks, dim = self.ranks, out.shape[3]
        arriving = out[0].index_select(0, self._indices(out.device)[0]).flatten()
        width = dealt[ranks.rank].num_query * dim
        sent = [ranks.count(self.num_rows, r) * width for r in range(ranks.size)]
        rows = ranks.count(self.num_rows, ranks.rank)
        received = [rows * heads.num_query * dim for heads in dealt]
        flat = _AllToAll.apply(arriving, sent, received, ranks.group)
        parts = [part.view(rows, heads.num_query, dim) for part, heads in zip(flat.split(received), dealt)]
        return torch.cat(parts, dim=1)[None]

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on:
            self._on[device] = (self.order.to(device), self.places.to(device))
        return self._on[device]
