"""Keys and values of generation: prompts stored once per group, responses one row per distinct prefix.

A *row* is one node that the decode batch computes: a prompt and a response prefix. Samples of a prompt that have drawn
the same tokens so far share a row; when they part, the row's own keys and values are copied. The first dimension of
every tensor is 2: keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_GROWTH = 16  # own space grows by at least so many tokens; unused space between rows halves the speed of reading them
_MAX_POOLS = 4  # prompts are regrouped when they lie in more pools


@dataclass(eq=False)
class PromptPool:
    """Prompts of similar length, padded to the longest. Gp groups, P tokens."""

    kv: list[Tensor]  # per layer [2, Gp, Hkv, P, D]
    lengths: np.ndarray  # [Gp] int64, tokens of each prompt
    groups: list[int]  # [Gp] group numbers


@dataclass(eq=False)
class KVCache:
    """Prompt pools and the responses' rows. M rows; `longest` is the most own tokens a row can come to."""

    longest: int = 1 << 62
    pools: list[PromptPool] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)  # per layer [2, capacity, Hkv, space, D]
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [M] own tokens stored
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [M] group of each row
    _done: set[int] = field(default_factory=set)  # groups nobody reads any more
    version: int = 0  # counts changes of rows and pools, for what is derived from them

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def add_prompts(self, kv: list[Tensor], index: list[np.ndarray], groups: list[int]) -> None:
        """Store prompts of new groups.

        Args:
            kv: per layer [2, Hkv, U, D], of a packed prefill of U tokens.
            index: per group [P] int64, where its prompt's tokens lie among the U.
            groups: the groups' numbers.
        """
        for members in similar_lengths([len(i) for i in index]):
            longest = max(len(index[m]) for m in members)
            grid = np.zeros((len(members), longest), np.int64)
            for row, m in enumerate(members):
                grid[row, : len(index[m])] = index[m]
            where = torch.from_numpy(grid.reshape(-1)).to(kv[0].device)
            pool = [layer.index_select(2, where).unflatten(2, grid.shape).transpose(1, 2).contiguous() for layer in kv]
            self.pools.append(
                PromptPool(pool, np.array([len(index[m]) for m in members]), [groups[m] for m in members])
            )
        self.version += 1

    def drop_prompts(self, finished: set[int]) -> None:
        """Forget the prompts of groups that are done: a pool is rebuilt when a third of it is, or dropped."""
        self._done |= finished
        pools = []
        for pool in self.pools:
            members = [i for i, group in enumerate(pool.groups) if group not in self._done]
            if 3 * len(members) > 2 * len(pool.groups):
                pools.append(pool)
            elif members:
                pools.append(_join([(pool, m) for m in members]))
        if any(a is not b for a, b in zip(pools, self.pools)) or len(pools) != len(self.pools):
            self.pools = pools
            self.version += 1

    def merge_pools(self) -> None:
        """When there are many pools, put all prompts into as few as their lengths allow."""
        if len(self.pools) <= _MAX_POOLS:
            return
        entries = [(pool, i) for pool in self.pools for i, g in enumerate(pool.groups) if g not in self._done]
        parts = similar_lengths([int(pool.lengths[i]) for pool, i in entries])
        if len(parts) < len(self.pools):
            self.pools = [_join([entries[m] for m in part]) for part in parts]
            self.version += 1

    def set_rows(self, source: np.ndarray, groups: np.ndarray, capacity: int = 0) -> None:
        """Replace the rows: new row j continues old row source[j] (a row may be continued twice), or is empty (-1).

        source [K] int64, groups [K] int64; `capacity` is a number of rows that may be needed later.
        """
        lengths = np.where(source >= 0, self.lengths[source] if len(self.lengths) else 0, 0)
        moved = np.flatnonzero((source >= 0) & (source != np.arange(len(source))))
        used = int(lengths[moved].max()) if len(moved) else 0
        self._reserve(max(len(source), capacity), 0)
        if used:
            target = torch.from_numpy(moved).to(self.own[0].device)
            origin = torch.from_numpy(source[moved]).to(self.own[0].device)
            for layer in self.own:
                layer[:, target, :, :used] = layer[:, origin, :, :used]
        self.lengths, self.groups = lengths, groups
        self.version += 1

    def _reserve(self, rows: int, tokens: int) -> None:
        """Make room for so many rows and own tokens per row."""
        if not self.own:
            self.own = [k.new_empty(2, 0, k.shape[2], 0, k.shape[4]) for k in self.pools[0].kv]
        _, capacity, _, space, _ = self.own[0].shape
        if rows <= capacity and tokens <= space:
            return
        capacity = max(rows, capacity)
        if tokens > space:
            space = max(tokens, min(tokens - 1 + max(tokens // 4, _GROWTH), self.longest))
        for i, old in enumerate(self.own):
            new = old.new_empty(2, capacity, old.shape[2], space, old.shape[4])
            new[:, : old.shape[1], :, : old.shape[3]] = old
            new[:, old.shape[1] :].zero_()  # zeros: masked scores must be finite
            new[:, : old.shape[1], :, old.shape[3] :].zero_()
            self.own[i] = new

    def grow(self) -> None:
        """Make room for one more token in every row."""
        self._reserve(self.num_rows, int(self.lengths.max()) + 1 if self.num_rows else 0)

    def clear(self) -> None:
        """Free everything."""
        self.pools, self.own = [], []
        self.lengths = self.groups = np.zeros(0, np.int64)
        self.version += 1


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Split indices so that padding to the longest of a part stays within a third plus a few tokens."""
    parts: list[list[int]] = []
    shortest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not parts or lengths[i] > 1.33 * shortest + 32:
            parts.append([])
            shortest = lengths[i]
        parts[-1].append(i)
    return parts


def _join(entries: list[tuple[PromptPool, int]]) -> PromptPool:
    """One pool of the given (pool, index) prompts."""
    lengths = np.array([pool.lengths[i] for pool, i in entries])
    longest = int(lengths.max())
    kv = []
    for layer, first in enumerate(entries[0][0].kv):
        out = first.new_zeros(2, len(entries), first.shape[2], longest, first.shape[4])
        for row, (pool, i) in enumerate(entries):
            out[:, row, :, : lengths[row]] = pool.kv[layer][:, i, :, : lengths[row]]
        kv.append(out)
    return PromptPool(kv, lengths, [pool.groups[i] for pool, i in entries])
