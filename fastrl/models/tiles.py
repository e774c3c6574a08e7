"""Exact attention in plain matrix products over tiles of a packed stream, with its own backward.

A tile is a run of query rows that read the same earlier rows (a prompt, say) and, under a mask, each other: several
short branches of the prefix tree, or a slice of a long one. Scores of one tile exist at a time; the backward pass
makes them again, but for short rows:

    P = softmax(cap(scaling Q K^T) + mask),   O = P V
    dV = P^T dO,  dS = P * (dO V^T - rowsum(P * dO V^T)),  dQ = scaling dS K,  dK = scaling dS^T Q

Query heads that share a key head are rows of the same product. Any device, any floating dtype: float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]  # rows [first, end)
Segment = tuple[int, int, tuple[Range, ...]]  # rows [start, end), after the keys of the rows in its prefix

SHORT_ROWS = 64  # branches share a tile up to so many rows: fewer, larger products (measured on the CPU)
KEPT_KEYS = 4  # probabilities of a tile are kept for the backward pass up to so many keys per head dimension
LONG_ROWS = 256  # a longer segment is cut: bounds the scores in memory and the products above the diagonal


class Branch(NamedTuple):
    """A segment, or a slice of one, inside a tile. Rows are relative to the tile's first."""

    start: int
    end: int
    inner: tuple[Range, ...]  # rows of the tile that come before it in its sequences
    position: int  # of its first token


@dataclass(frozen=True)
class Tile:
    """Query rows [start, stop) read all keys of the rows in `prefix` and those of each other that the mask allows."""

    start: int
    stop: int
    prefix: tuple[Range, ...]
    branches: tuple[Branch, ...]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_prefix(self) -> int:
        return _size(self.prefix)

    @property
    def num_keys(self) -> int:
        return self.num_prefix + self.num_rows


def _size(ranges: Sequence[Range]) -> int:
    return sum(end - first for first, end in ranges)


def cut(segments: Sequence[Segment], *, short_rows: int = SHORT_ROWS, long_rows: int = LONG_ROWS) -> list[Tile]:
    """Tiles that cover all rows of the segments, in order."""
    tiles: list[Tile] = []
    for start, end, prefix in segments:
        position = _size(prefix)
        if tiles and tiles[-1].stop == start and end - tiles[-1].start <= short_rows:
            tile = tiles[-1]
            outer = tuple((a, min(b, tile.start)) for a, b in prefix if a < tile.start)
            if outer == tile.prefix:
                inner = tuple((max(a, tile.start) - tile.start, b - tile.start) for a, b in prefix if b > tile.start)
                branch = Branch(start - tile.start, end - tile.start, inner, position)
                tiles[-1] = Tile(tile.start, end, tile.prefix, (*tile.branches, branch))
                continue
        for row in range(start, end, long_rows):
            before = (*prefix, (start, row)) if row > start else prefix
            stop = min(row + long_rows, end)
            tiles.append(Tile(row, stop, before, (Branch(0, stop - row, (), position + row - start),)))
    return tiles


def own_mask(tile: Tile) -> Tensor:
    """True [rows, rows] where a row of the tile must not read another one of it."""
    hidden = torch.ones(tile.num_rows, tile.num_rows, dtype=torch.bool)
    for start, end, inner, _ in tile.branches:
        for a, b in inner:
            hidden[start:end, a:b] = False
        hidden[start:end, start:end].triu_(1)
    return hidden


def window_mask(tile: Tile, window: int) -> Tensor:
    """True [rows, keys]: `own_mask`, and keys `window` or more positions before the query."""
    position = torch.cat([torch.arange(b.position, b.position + b.end - b.start) for b in tile.branches])
    key_position = torch.cat([torch.arange(tile.num_prefix), position])
    hidden = torch.nn.functional.pad(own_mask(tile), (tile.num_prefix, 0))
    return hidden | (position[:, None] - key_position >= window)


class TilePlan:
    """The tiles of a micro-batch and their masks, made once and used by every layer."""

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        *,
        short_rows: int = SHORT_ROWS,
        long_rows: int = LONG_ROWS,
    ) -> None:
        self.device = device
        self.tiles = cut(segments, short_rows=short_rows, long_rows=long_rows)
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
        ranges = [r for t in self.tiles for r in (*t.prefix, (t.start, t.stop))]
        parts = [torch.arange(first, end) for first, end in ranges]
        # rows whose keys the tiles read, one tile after another
        self.key_index = (torch.cat(parts) if parts else torch.arange(0)).to(device)
        self.key_start = [0]
        for t in self.tiles:
            self.key_start.append(self.key_start[-1] + t.num_keys)

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Per tile 0 or -inf [rows, 1, columns], for the last columns of its scores."""
        if window is not None and all(t.num_keys <= window for t in self.tiles):
            window = None
        key = (window, dtype)
        if key not in self._masks:
            made: dict[Any, Tensor] = {}
            found = []
            for t in self.tiles:
                shape = (t.branches, None if window is None else t.num_prefix)
                if shape not in made:
                    hidden = own_mask(t) if window is None else window_mask(t, window)
                    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
                    made[shape] = bias[:, None].to(self.device)
                found.append(made[shape])
            self._masks[key] = found
        return self._masks[key]


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TilePlan,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [1, Hq, U, D], key [1, Hkv, U, D], value [1, Hkv, U, Dv], sinks [Hq] -> output [1, U, Hq, Dv].

    Under autocast the products run in its dtype; scores and softmax of half-precision inputs are float32.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    masks = plan.masks(sliding_window, torch.float64 if dtype == torch.float64 else torch.float32)
    settings = _Settings(plan, masks, scaling, softcap)
    return _TiledAttention.apply(query.to(dtype), key.to(dtype), value.to(dtype), sinks, settings)


@dataclass(frozen=True)
class _Settings:
    plan: TilePlan
    masks: list[Tensor]
    scaling: float
    softcap: float | None


@dataclass
class _Operands:
    """The inputs as the tiles read them. K key rows over all tiles, R = Hq / Hkv query heads per key head."""

    query: Tensor  # [Hkv, U, R, D], already multiplied by scaling
    key: Tensor  # [Hkv, K, D]
    value: Tensor  # [Hkv, K, Dv]
    sinks: Tensor | None  # [Hkv, 1, R, 1]

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, settings: _Settings) -> _Operands:
        num_key_heads, num_rows = key.shape[1], query.shape[2]
        repeats = query.shape[1] // num_key_heads
        scaled = query.new_empty(num_key_heads, num_rows, repeats, query.shape[3])
        torch.mul(query[0].unflatten(0, (num_key_heads, repeats)).transpose(1, 2), settings.scaling, out=scaled)
        index = settings.plan.key_index
        return cls(
            scaled,
            key[0].transpose(0, 1).index_select(0, index).transpose(0, 1),
            value[0].transpose(0, 1).index_select(0, index).transpose(0, 1),
            None if sinks is None else sinks.view(num_key_heads, 1, repeats, 1),
        )

    def tile(self, settings: _Settings, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """(query [Hkv, rows R, D], key [Hkv, keys, D], value [Hkv, keys, Dv]) of tile i."""
        tile, keys = settings.plan.tiles[i], slice(*settings.plan.key_start[i : i + 2])
        return self.query[:, tile.start : tile.stop].flatten(1, 2), self.key[:, keys], self.value[:, keys]

    def probabilities(self, settings: _Settings, i: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """(P [Hkv, rows R, keys (+ 1 with sinks)], capped scores where the backward pass needs them)."""
        scores = torch.bmm(query, key.transpose(1, 2))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        capped = None
        if settings.softcap is not None:
            capped = scores.div_(settings.softcap).tanh_()
            scores = capped * settings.softcap
        mask, repeats = settings.masks[i], self.query.shape[2]
        scores = scores.unflatten(1, (-1, repeats))  # [Hkv, rows, R, keys]
        scores[..., -mask.shape[-1] :] += mask
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype).expand(-1, scores.shape[1], -1, -1)
            scores = torch.cat([scores, sinks], dim=-1)
        return torch.softmax(scores, dim=-1).flatten(1, 2), capped


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, settings: _Settings
    ) -> Tensor:
        num_key_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
        out = value.new_empty(query.shape[2], num_key_heads, repeats, value.shape[3])
        kept: list[Tensor | None] = []
        with torch.autocast(query.device.type, enabled=False):
            operands = _Operands.of(query, key, value, sinks, settings)
            for i, tile in enumerate(settings.plan.tiles):
                q, k, v = operands.tile(settings, i)
                probabilities, _ = operands.probabilities(settings, i, q, k)
                rows = torch.bmm(probabilities[..., : tile.num_keys].to(v.dtype), v)
                out[tile.start : tile.stop] = rows.unflatten(1, (-1, repeats)).transpose(0, 1)
                small = tile.num_keys <= KEPT_KEYS * q.shape[-1] and settings.softcap is None
                kept.append(probabilities if small and any(ctx.needs_input_grad) else None)
        ctx.save_for_backward(operands.query, operands.key, operands.value, operands.sinks, *kept)
        ctx.settings = settings
        return out.view(1, query.shape[2], -1, value.shape[3])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, *kept = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            return (*_gradients(_Operands(query, key, value, sinks), kept, grads[0], ctx.settings), None)


def _gradients(
    operands: _Operands, kept: Sequence[Tensor | None], grad: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query [1, Hq, U, D], key [1, Hkv, U, D], value [1, Hkv, U, Dv] and sinks [Hq]."""
    num_key_heads, num_rows, repeats, dim = operands.query.shape
    grad_out = grad.reshape(num_rows, num_key_heads, repeats, -1).transpose(0, 1).contiguous()  # [Hkv, U, R, Dv]
    grad_query = operands.query.new_empty(num_rows, num_key_heads, repeats, dim)
    grad_key = operands.key.new_zeros(num_key_heads, num_rows, dim)
    grad_value = operands.value.new_zeros(num_key_heads, num_rows, operands.value.shape[-1])
    grad_sinks = None if operands.sinks is None else operands.sinks.new_zeros(num_key_heads, repeats)
    for i, tile in enumerate(settings.plan.tiles):
        q, k, v = operands.tile(settings, i)
        g = grad_out[:, tile.start : tile.stop].flatten(1, 2)
        p, capped = kept[i], None
        if p is None:
            p, capped = operands.probabilities(settings, i, q, k)
        tile_grad_value = torch.bmm(p[..., : tile.num_keys].to(g.dtype).transpose(1, 2), g)
        grad_p = torch.bmm(g, v.transpose(1, 2)).to(p.dtype)
        if grad_sinks is not None:
            grad_p = torch.nn.functional.pad(grad_p, (0, 1))
        grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
        if grad_sinks is not None:
            grad_sinks += grad_scores[..., -1].unflatten(1, (-1, repeats)).sum(1)
            grad_scores = grad_scores[..., :-1]
        if capped is not None:
            grad_scores = grad_scores * (1 - capped.square())
        grad_scores = grad_scores.to(q.dtype)
        grad_query[tile.start : tile.stop] = torch.bmm(grad_scores, k).unflatten(1, (-1, repeats)).transpose(0, 1)
        tile_grad_key = torch.bmm(grad_scores.transpose(1, 2), q)
        for total, part in ((grad_key, tile_grad_key), (grad_value, tile_grad_value)):
            place = 0
            for first, end in (*tile.prefix, (tile.start, tile.stop)):
                total[:, first:end] += part[:, place : place + end - first]
                place += end - first
    grad_query *= settings.scaling
    shaped = grad_query.view(num_rows, -1, dim).transpose(0, 1)[None]
    return shaped, grad_key[None], grad_value[None], None if grad_sinks is None else grad_sinks.flatten()
