"""Who attends to whom while generating: the prefill of many prompts in one stream, and one decode step of many rows.

Both are given to a model as `fastrl_layout=`; its attention layers then call `attend` (see models/attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fastrl.rollout.kv_cache import KVCache


class PackedPrompts:
    """Distinct prompts as one stream in which a common beginning appears once.

    Prompts are sorted; each contributes the tokens after what it shares with its predecessor. Everything a prompt
    shares with any other it shares with a neighbour, so this is the prefix tree. U tokens in all.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        order = sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))
        self.index: list[np.ndarray] = [np.zeros(0, np.int64)] * len(prompts)  # per prompt [P]: its tokens' places
        self.segments: list[tuple[int, int, int]] = []  # (prompt, first and end of its own tokens in the stream)
        tokens: list[int] = []
        positions: list[int] = []
        before: Sequence[int] = ()
        before_index = np.zeros(0, np.int64)
        for i in order:
            shared = _common_length(before, prompts[i])
            start, end = len(tokens), len(tokens) + len(prompts[i]) - shared
            tokens.extend(prompts[i][shared:])
            positions.extend(range(shared, len(prompts[i])))
            self.index[i] = np.concatenate([before_index[:shared], np.arange(start, end)])
            self.segments.append((i, start, end))
            before, before_index = prompts[i], self.index[i]
        self.tokens = np.array(tokens, np.int64)  # [U]
        self.positions = np.array(positions, np.int64)  # [U]
        self.last = np.array([index[-1] for index in self.index], np.int64)  # the row that predicts the first token


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class PrefillLayout:
    """Causal attention inside each prompt; collects keys and values per layer."""

    def __init__(self, packed: PackedPrompts, device: torch.device) -> None:
        self.packed = packed
        self.device = device
        self.kv: dict[int, Tensor] = {}  # layer -> [Hkv, U, Dk + Dv]
        self._index = [torch.from_numpy(i).to(device) for i in packed.index]
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

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
        """query [1, Hq, U, D], key and value [1, Hkv, U, D] -> [1, U, Hq, Dv]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        return self.attend_rows(layer, q, k, v, scaling, sliding_window, softcap, sinks)[None]

    def attend_rows(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [U, Hq, D], key and value [U, Hkv, D] -> [U, Hq, Dv]; keeps key and value."""
        query, key, value = _autocast(query, key, value)
        kv = torch.cat([key, value], dim=-1).transpose(0, 1).contiguous()  # [Hkv, U, Dk + Dv]
        self.kv[layer] = kv
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        for prompt, start, end in self.packed.segments:
            where = self._index[prompt]
            whole = len(where) == end - start  # nothing shared: its tokens are the stream's start..end
            keys_values = (kv[:, start:end] if whole else kv.index_select(1, where))[None]
            k, v = keys_values[..., : key.shape[-1]], keys_values[..., key.shape[-1] :]
            q = query[start:end].transpose(0, 1)[None]
            mask = self._mask(end - start, len(where), sliding_window)
            if softcap is None and sinks is None:
                causal = mask is None and end - start > 1
                piece = scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
                )
            else:
                piece = _explicit(q, k, v, mask, scaling, softcap, sinks)
            out[start:end] = piece[0].transpose(0, 1)
        return out

    def _mask(self, rows: int, keys: int, window: int | None) -> Tensor | None:
        """Bottom-right causal mask [rows, keys] bool; None where the plain causal (or no) mask says the same."""
        window = None if window is None or window >= keys else window
        if window is None and rows in (1, keys):
            return None
        if (rows, keys, window) not in self._masks:
            distance = torch.arange(keys - rows, keys, device=self.device)[:, None] - torch.arange(
                keys, device=self.device
            )
            allowed = distance >= 0
            self._masks[rows, keys, window] = allowed if window is None else allowed & (distance < window)
        return self._masks[rows, keys, window]


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out, for score caps and sinks: q [1, Hq, R, D], k [1, Hkv, K, D] -> [1, Hq, R, Dv]."""
    _, heads, rows, _ = q.shape
    repeat = heads // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = _cap(q @ k.transpose(-1, -2) * scaling, softcap)
    if mask is None:
        mask = torch.ones(rows, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - rows)
    scores = scores.masked_fill(~mask, -math.inf)
    extra = None if sinks is None else sinks.reshape(1, heads, 1, 1).expand(1, heads, rows, 1)
    return _softmax(scores, extra).to(v.dtype) @ v


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's type where autocast is on, so that keys and values are stored in it."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) for t in tensors)


def _cap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension in float32 or wider, with one more logit that takes mass and has no value."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    return torch.softmax(torch.cat([scores, sinks.to(scores.dtype)], dim=-1), dim=-1, dtype=dtype)[..., :-1]


class _Grid(NamedTuple):
    """Rows of a pool of Gp prompts, arranged as Gp x n so that one batched product serves them."""

    rows: Tensor  # [Gp n] the row in each place, row 0 where a prompt has fewer than n
    back: Tensor  # [m] the place of each member
    members: Tensor  # [m] the pool's rows, ascending
    n: int
    complete: bool  # whether the members are all rows


class DecodeLayout:
    """One token per row over [the prompt of its group ; its own tokens]. M rows.

    The prompt part is one batched product per pool: all rows of a group against its keys. The own part is one batched
    product over rows. Both parts meet in one softmax.
    """

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
        self._lengths = torch.from_numpy(cache.lengths).to(self.device)
        return self._prompt_lengths_np + cache.lengths

    def end(self) -> None:
        """Every row has one more token."""
        self.cache.lengths = self.cache.lengths + 1

    def _index_rows(self) -> None:
        """Find the rows of each pool's groups."""
        cache = self.cache
        self._prompt_lengths_np = np.zeros(cache.num_rows, np.int64)
        self._grids: list[_Grid | None] = []
        widths = []
        self._ragged_prompts = False
        for pool in cache.pools:
            slot = {group: i for i, group in enumerate(pool.groups)}
            members = np.flatnonzero(np.isin(cache.groups, pool.groups))
            if not len(members):
                self._grids.append(None)
                continue
            slots = np.array([slot[g] for g in cache.groups[members]])
            counts = np.bincount(slots, minlength=len(pool.groups))
            order = np.argsort(slots, kind="stable")
            rank = np.empty(len(slots), np.int64)  # of a row among those of its group
            rank[order] = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
            n = int(counts.max())
            rows = np.zeros(len(pool.groups) * n, np.int64)
            rows[slots * n + rank] = members
            self._prompt_lengths_np[members] = pool.lengths[slots]
            widths.append(pool.kv[0].shape[2])
            self._ragged_prompts |= bool((pool.lengths[slots] != widths[-1]).any())
            back, complete = self._put(slots * n + rank), len(members) == cache.num_rows
            self._grids.append(_Grid(self._put(rows), back, self._put(members), n, complete))
        self._longest_prompt = max(widths)
        self._ragged_prompts |= min(widths) != self._longest_prompt
        self._prompt_lengths = self._put(self._prompt_lengths_np)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _mask(self, window: int | None) -> Tensor | None:
        """What each row may read of [prompt ; own] [M, 1, 1, P + L] bool; None when it is everything."""
        if window is not None and int((self._prompt_lengths_np + self.cache.lengths).max()) < window:
            window = None
        if window not in self._masks:
            if window is None and self._uniform and not self._ragged_prompts:
                self._masks[window] = None
            else:
                prompt = torch.arange(self._longest_prompt, device=self.device) - self._prompt_lengths[:, None]
                own = torch.arange(self._step + 1, device=self.device) - self._lengths[:, None]
                allowed = torch.cat([prompt < 0, own <= 0], dim=-1)
                if window is not None:  # distances: own index - length, and for the prompt further by the length
                    behind = torch.cat([prompt - self._lengths[:, None], own], dim=-1)
                    allowed &= behind > -window
                self._masks[window] = allowed[:, None, None]
        return self._masks[window]

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
        """query [1, Hq, M, D], key and value [1, Hkv, M, D] of the new tokens -> [1, M, Hq, Dv]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        return self.attend_rows(layer, q, k, v, scaling, sliding_window, softcap, sinks)[None]

    def attend_rows(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [M, Hq, D], key and value [M, Hkv, D] -> [M, Hq, Dv]; stores key and value as the rows' next token."""
        cache = self.cache
        query, key, value = _autocast(query, key, value)
        rows, heads, _ = query.shape
        kv_heads, dk = key.shape[1], key.shape[2]
        own = cache.own[layer][:rows]
        if self._uniform:
            own[:, :, self._step, :dk] = key
            own[:, :, self._step, dk:] = value
        else:
            where = torch.arange(rows, device=self.device)
            own[where, :, self._lengths] = torch.cat([key, value], dim=-1)
        own = own[:, :, : self._step + 1]
        q = (query * scaling).reshape(rows, kv_heads, heads // kv_heads, dk)
        own_scores = torch.matmul(q, own[..., :dk].transpose(-1, -2))
        scores = _cap(torch.cat([self._prompt_scores(layer, q, dk), own_scores], dim=-1), softcap)
        mask = self._mask(sliding_window)
        if mask is not None:
            scores.masked_fill_(~mask, -math.inf)
        extra = None if sinks is None else sinks.reshape(1, kv_heads, -1, 1).expand(rows, kv_heads, -1, 1)
        weights = _softmax(scores, extra).to(value.dtype)
        out = torch.matmul(weights[..., self._longest_prompt :], own[..., dk:])
        self._add_prompt_values(layer, weights, out, dk)
        return out.reshape(rows, heads, value.shape[-1])

    def _prompt_scores(self, layer: int, q: Tensor, dk: int) -> Tensor:
        """q [M, Hkv, r, D] -> scores against the prompts [M, Hkv, r, P]."""
        out = None
        for kv, grid in self._pools(layer):
            grouped = q.index_select(0, grid.rows).unflatten(0, (-1, grid.n)).transpose(1, 2).flatten(2, 3)
            scores = torch.matmul(grouped, kv[..., :dk].transpose(-1, -2))  # [Gp, Hkv, n r, Pp]
            scores = scores.unflatten(2, (grid.n, -1)).transpose(1, 2).flatten(0, 1).index_select(0, grid.back)
            if grid.complete:
                return scores
            if out is None:
                out = q.new_zeros(*q.shape[:3], self._longest_prompt)
            out[grid.members, :, :, : scores.shape[-1]] = scores
        assert out is not None
        return out

    def _add_prompt_values(self, layer: int, weights: Tensor, out: Tensor, dk: int) -> None:
        """out [M, Hkv, r, Dv] += weights over the prompts times their values."""
        for kv, grid in self._pools(layer):
            w = weights[..., : kv.shape[2]].index_select(0, grid.rows)
            w = w.unflatten(0, (-1, grid.n)).transpose(1, 2).flatten(2, 3)
            part = torch.matmul(w, kv[..., dk:]).unflatten(2, (grid.n, -1)).transpose(1, 2).flatten(0, 1)
            if grid.complete:
                out.add_(part.index_select(0, grid.back))
            else:
                out.index_add_(0, grid.members, part.index_select(0, grid.back))

    def _pools(self, layer: int) -> Iterator[tuple[Tensor, _Grid]]:
        for pool, grid in zip(self.cache.pools, self._grids):
            if grid is not None:
                yield pool.kv[layer], grid
