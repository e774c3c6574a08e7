"""One decode step: every row's new token over [the prompt of its group ; its own tokens]. M rows.

The prompt part is one batched product per pool, all rows of a group against its keys; the own part is one batched
product over rows. Both meet in one softmax. A step of a small model is bound by the number of operations, each of
which starts with cold caches behind the last weight product, so gathers are made in units that need no second copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastrl.rollout.kv_cache import KVCache
from fastrl.rollout.layouts import RowsLayout, autocast, cap, softmax


class _Pool(NamedTuple):
    """The rows of a pool of Gp prompts, arranged as Gp x n so that one batched product serves them."""

    place: np.ndarray  # [m] slot * n + rank of each member
    members: np.ndarray  # [m] the pool's rows, ascending
    n: int
    slots: int  # Gp
    complete: bool  # whether the members are all rows


class _Units(NamedTuple):
    """Index between (row, key head) units and a pool's (slot, key head, rank) places."""

    into: Tensor  # [Gp Hkv n] the unit in each place; row 0 where a prompt has fewer than n rows
    back: Tensor  # [m Hkv] the place of each member's unit
    units: Tensor  # [m Hkv] the members' units
    n: int
    complete: bool


class DecodeLayout(RowsLayout):
    """The rows of a KVCache; `begin` before and `end` after each forward pass."""

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self._version = -1

    def begin(self) -> np.ndarray:
        """Prepare a step; returns the positions [M] int64 of the tokens that it appends."""
        cache = self.cache
        cache.grow()
        if self._version != cache.version:
            self._index_rows()
            self._version = cache.version
        self._step = int(cache.lengths.max())
        self._uniform = bool((cache.lengths == self._step).all())
        self._masks: dict[int | None, Tensor | None] = {}
        self._lengths = self._put(cache.lengths)
        return self._prompt_lengths + cache.lengths

    def end(self) -> None:
        """Every row has one more token."""
        self.cache.lengths = self.cache.lengths + 1

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _index_rows(self) -> None:
        """Find the rows of each pool's groups."""
        cache = self.cache
        self._prompt_lengths = np.zeros(cache.num_rows, np.int64)
        self._pools: list[_Pool | None] = []
        self._units: dict[int, list[_Units | None]] = {}
        widths = []
        self._ragged_prompts = False
        for pool in cache.pools:
            slot = {group: i for i, group in enumerate(pool.groups)}
            members = np.flatnonzero(np.isin(cache.groups, pool.groups))
            if not len(members):
                self._pools.append(None)
                continue
            slots = np.array([slot[g] for g in cache.groups[members]])
            counts = np.bincount(slots, minlength=len(pool.groups))
            order = np.argsort(slots, kind="stable")
            rank = np.empty(len(slots), np.int64)  # of a row among those of its group
            rank[order] = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
            n = int(counts.max())
            self._prompt_lengths[members] = pool.lengths[slots]
            widths.append(pool.kv[0].shape[3])
            self._ragged_prompts |= bool((pool.lengths[slots] != widths[-1]).any())
            complete = len(members) == cache.num_rows
            self._pools.append(_Pool(slots * n + rank, members, n, len(pool.groups), complete))
        self._longest_prompt = max(widths)
        self._ragged_prompts |= min(widths) != self._longest_prompt

    def _units_of(self, kv_heads: int) -> list[_Units | None]:
        """The indices for layers with so many key heads."""
        if kv_heads not in self._units:
            self._units[kv_heads] = [
                None if pool is None else self._index_units(pool, kv_heads) for pool in self._pools
            ]
        return self._units[kv_heads]

    def _index_units(self, pool: _Pool, kv_heads: int) -> _Units:
        head = np.arange(kv_heads)
        slot, rank = np.divmod(pool.place, pool.n)
        back = ((slot[:, None] * kv_heads + head) * pool.n + rank[:, None]).reshape(-1)
        units = (pool.members[:, None] * kv_heads + head).reshape(-1)
        into = np.tile(np.repeat(head, pool.n), pool.slots)
        into[back] = units
        return _Units(self._put(into), self._put(back), self._put(units), pool.n, pool.complete)

    def _mask(self, window: int | None) -> Tensor | None:
        """What each row may not read of [prompt ; own] [M, 1, 1, P + L] bool; None when it may read everything."""
        if window is not None and int((self._prompt_lengths + self.cache.lengths).max()) < window:
            window = None
        if window not in self._masks:
            if window is None and self._uniform and not self._ragged_prompts:
                self._masks[window] = None
            else:
                prompt = (
                    torch.arange(self._longest_prompt, device=self.device) - self._put(self._prompt_lengths)[:, None]
                )
                own = torch.arange(self._step + 1, device=self.device) - self._lengths[:, None]
                hidden = torch.cat([prompt >= 0, own > 0], dim=-1)
                if window is not None:  # distances: own index - length, and for the prompt further by the length
                    hidden |= torch.cat([prompt - self._lengths[:, None], own], dim=-1) <= -window
                self._masks[window] = hidden[:, None, None]
        return self._masks[window]

    def attend_rows(
        self,
        layer: int,
        qkv: Tensor,
        heads: int,
        scaling: float = 1.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See RowsLayout."""
        qkv = autocast(qkv)
        rows, all_heads, dim = qkv.shape
        kv_heads = (all_heads - heads) // 2
        own = self._append(layer, qkv[:, heads:].unflatten(1, (2, kv_heads)))
        keys, values = own[0].flatten(0, 1), own[1].flatten(0, 1)  # [M Hkv, L, D], views
        q = qkv[:, :heads].reshape(rows * kv_heads, -1, dim)
        if scaling != 1.0:
            q = q * scaling
        scores = torch.cat([self._prompt_scores(layer, q, kv_heads), torch.bmm(q, keys.transpose(1, 2))], dim=-1)
        scores = cap(scores, softcap)
        mask = self._mask(sliding_window)
        if mask is not None:
            scores.unflatten(0, (rows, kv_heads)).masked_fill_(mask, -math.inf)
        extra = None if sinks is None else sinks.reshape(1, kv_heads, -1).expand(rows, -1, -1).flatten(0, 1)[..., None]
        weights = softmax(scores, extra).to(qkv.dtype)
        prompt = self._prompt_values(layer, weights, kv_heads)
        return torch.baddbmm(prompt, weights[..., self._longest_prompt :], values).view(rows, heads * dim)

    def _append(self, layer: int, kv: Tensor) -> Tensor:
        """Store kv [M, 2, Hkv, D] as the rows' next token; returns all own tokens [2, M, Hkv, L, D]."""
        own = self.cache.own[layer][:, : len(kv)]
        if self._uniform:
            own[:, :, :, self._step] = kv.transpose(0, 1)
        else:
            own[:, torch.arange(len(kv), device=self.device), :, self._lengths] = kv
        return own[:, :, :, : self._step + 1]

    def _each_pool(self, layer: int, kv_heads: int) -> Iterator[tuple[Tensor, _Units]]:
        for pool, units in zip(self.cache.pools, self._units_of(kv_heads)):
            if units is not None:
                yield pool.kv[layer], units

    def _prompt_scores(self, layer: int, q: Tensor, kv_heads: int) -> Tensor:
        """q [M Hkv, r, D] -> scores against the prompts [M Hkv, r, P]."""
        out = None
        for kv, index in self._each_pool(layer, kv_heads):
            grouped = q.index_select(0, index.into).view(-1, index.n * q.shape[1], q.shape[2])
            scores = torch.bmm(grouped, kv[0].flatten(0, 1).transpose(1, 2))  # [Gp Hkv, n r, Pp]
            scores = scores.view(-1, q.shape[1], scores.shape[-1]).index_select(0, index.back)
            if index.complete:
                return scores
            if out is None:
                out = q.new_zeros(*q.shape[:2], self._longest_prompt)
            out[:, :, : scores.shape[-1]].index_copy_(0, index.units, scores)
        assert out is not None
        return out

    def _prompt_values(self, layer: int, weights: Tensor, kv_heads: int) -> Tensor:
        """weights [M Hkv, r, P + L] -> the prompts' part of the output [M Hkv, r, D]."""
        out = None
        for kv, index in self._each_pool(layer, kv_heads):
            width, r = kv.shape[3], weights.shape[1]
            grouped = weights[..., :width].index_select(0, index.into).view(-1, index.n * r, width)
            part = torch.bmm(grouped, kv[1].flatten(0, 1)).view(-1, r, kv.shape[4]).index_select(0, index.back)
            if index.complete:
                return part
            if out is None:
                out = part.new_zeros(len(weights), r, kv.shape[4])
            out.index_copy_(0, index.units, part)
        assert out is not None
        return out
