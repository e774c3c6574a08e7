"""Exact attention in plain matrix products over tiles of a packed stream, with its own backward.

A tile is a run of query rows and the keys they read: a prompt's rows and the prompt; a few short responses of one
group, their common prompt and themselves under a block-causal mask; or a slice of a long segment and all before it.
Scores of one tile exist at a time and are made again in the backward pass:

    P = softmax(cap(scaling Q K^T) + mask),   O = P V
    dV = P^T dO,  dS = P * (dO V^T - rowsum(P * dO V^T)),  dQ = scaling dS K,  dK = scaling dS^T Q

Query heads that share a key head are rows of the same product. Any device, any floating dtype: float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Segment = tuple[int, int, int, int]  # rows [start, end), after the keys of rows [prefix_start, prefix_end)

SHORT_ROWS = 64  # responses of one prompt share a tile up to so many rows: fewer, larger products (measured on the CPU)
LONG_ROWS = 256  # a longer segment is cut: bounds the scores in memory and the products above the diagonal


@dataclass(frozen=True)
class Tile:
    """Query rows [start, stop) read the keys of rows [prefix_start, prefix_end) and [own_start, stop), masked."""

    start: int
    stop: int
    own_start: int
    prefix_start: int
    prefix_end: int
    borders: tuple[int, ...]  # first rows of the segments in the tile, relative to own_start

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_prefix(self) -> int:
        return self.prefix_end - self.prefix_start

    @property
    def num_keys(self) -> int:
        return self.num_prefix + self.stop - self.own_start


def cut(segments: Sequence[Segment], *, short_rows: int = SHORT_ROWS, long_rows: int = LONG_ROWS) -> list[Tile]:
    """Tiles that cover all rows of the segments, in order."""
    tiles: list[Tile] = []
    for start, end, prefix_start, prefix_end in segments:
        last = tiles[-1] if tiles else None
        joins = last is not None and last.stop == start and end - last.start <= short_rows and prefix_end > prefix_start
        if last is not None and joins and (last.prefix_start, last.prefix_end) == (prefix_start, prefix_end):
            borders = (*last.borders, start - last.own_start)
            tiles[-1] = Tile(last.start, end, last.own_start, prefix_start, prefix_end, borders)
            continue
        for row in range(start, end, long_rows):
            tiles.append(Tile(row, min(row + long_rows, end), start, prefix_start, prefix_end, (0,)))
    return tiles


def diagonal_mask(tile: Tile, device: torch.device) -> Tensor:
    """True [rows, rows] where a row of the tile must not read one of the tile's own rows."""
    segment, row = _own_rows(tile, device)
    segment, row = segment[tile.start - tile.own_start :], row[tile.start - tile.own_start :]
    return (segment[:, None] != segment) | (row[:, None] < row)


def window_mask(tile: Tile, window: int, device: torch.device) -> Tensor:
    """True [rows, keys] where a row must not read a key: other segment, later, or `window` or more positions before."""
    segment, row = _own_rows(tile, device)
    first = torch.tensor(tile.borders, device=device)[segment]
    position = row - first + tile.num_prefix  # of the own rows, in their own sequence
    prefix = torch.arange(tile.num_prefix, device=device)
    key_position = torch.cat([prefix, position])
    key_segment = torch.cat([torch.full_like(prefix, -1), segment])
    queries = slice(tile.start - tile.own_start, None)
    distance = position[queries][:, None] - key_position
    same = (key_segment == -1) | (segment[queries][:, None] == key_segment)
    return ~same | (distance < 0) | (distance >= window)


def _own_rows(tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """Segment number and row number, relative to own_start, of the rows [own_start, stop)."""
    row = torch.arange(tile.stop - tile.own_start, device=device)
    return torch.bucketize(row, torch.tensor(tile.borders, device=device), right=True) - 1, row


class TilePlan:
    """The tiles of a micro-batch and their masks, made once and used by every layer."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.device = device
        self.tiles = cut(segments)
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
        rows = torch.arange(max((t.stop for t in self.tiles), default=0))
        parts = [rows[r] for t in self.tiles for r in (slice(t.prefix_start, t.prefix_end), slice(t.own_start, t.stop))]
        self.key_index = (torch.cat(parts) if parts else rows).to(
            device
        )  # rows whose keys the tiles read, one after another
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
                shape = (t.num_rows, t.stop - t.own_start, t.borders, None if window is None else t.num_prefix)
                if shape not in made:
                    hidden = diagonal_mask(t, self.device) if window is None else window_mask(t, window, self.device)
                    zeros = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
                    made[shape] = zeros.masked_fill_(hidden, float("-inf"))[:, None]
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
        ctx.save_for_backward(query, key, value, sinks)
        ctx.settings = settings
        num_key_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
        out = value.new_empty(query.shape[2], num_key_heads, repeats, value.shape[3])
        with torch.autocast(query.device.type, enabled=False):
            operands = _Operands.of(query, key, value, sinks, settings)
            for i, tile in enumerate(settings.plan.tiles):
                q, k, v = operands.tile(settings, i)
                probabilities, _ = operands.probabilities(settings, i, q, k)
                rows = torch.bmm(probabilities[..., : tile.num_keys].to(v.dtype), v)
                out[tile.start : tile.stop] = rows.unflatten(1, (-1, repeats)).transpose(0, 1)
        return out.view(1, query.shape[2], -1, value.shape[3])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            return (*_gradients(query, key, value, sinks, grads[0], ctx.settings), None)


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, grad: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    num_key_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
    operands = _Operands.of(query, key, value, sinks, settings)
    num_rows = query.shape[2]
    grad_out = grad.view(num_rows, num_key_heads, repeats, -1).transpose(0, 1).contiguous()  # [Hkv, U, R, Dv]
    grad_query = query.new_empty(num_rows, num_key_heads, repeats, query.shape[3])
    grad_key, grad_value = key.new_zeros(key.shape[1:]), value.new_zeros(value.shape[1:])
    grad_sinks = None if sinks is None else sinks.new_zeros(num_key_heads, repeats)
    for i, tile in enumerate(settings.plan.tiles):
        q, k, v = operands.tile(settings, i)
        g = grad_out[:, tile.start : tile.stop].flatten(1, 2)
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
            total[:, tile.own_start : tile.stop] += part[:, tile.num_prefix :]
            if tile.num_prefix:
                total[:, tile.prefix_start : tile.prefix_end] += part[:, : tile.num_prefix]
    grad_query *= settings.scaling
    shaped = grad_query.view(num_rows, -1, query.shape[3]).transpose(0, 1)[None]
    return shaped, grad_key[None], grad_value[None], None if grad_sinks is None else grad_sinks.flatten()
