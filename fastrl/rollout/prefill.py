"""The prefill of many prompts as one stream, each common beginning once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastrl.rollout.layouts import RowsLayout, autocast, cap, softmax


class PackedPrompts:
    """Distinct prompts as one stream in which a common beginning appears once. U tokens in all.

    Prompts are sorted; each contributes the tokens after what it shares with its predecessor. Everything a prompt
    shares with any other it shares with a neighbour, so this is the prefix tree.
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


class PrefillLayout(RowsLayout):
    """Causal attention inside each prompt; collects keys and values per layer."""

    def __init__(self, packed: PackedPrompts, device: torch.device) -> None:
        self.packed = packed
        self.device = device
        self.kv: dict[int, Tensor] = {}  # layer -> [2, Hkv, U, D]
        self._index = [torch.from_numpy(i).to(device) for i in packed.index]
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

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
        kv = qkv[:, heads:].unflatten(1, (2, -1)).permute(1, 2, 0, 3).contiguous()
        self.kv[layer] = kv
        out = qkv.new_empty(qkv.shape[0], heads, qkv.shape[2])
        for prompt, start, end in self.packed.segments:
            where = self._index[prompt]
            whole = len(where) == end - start  # nothing shared: its tokens are the stream's start..end
            k, v = (kv[:, :, start:end] if whole else kv.index_select(2, where))[:, None]
            q = qkv[start:end, :heads].transpose(0, 1)[None]
            mask = self._mask(end - start, len(where), sliding_window)
            if softcap is None and sinks is None:
                causal = mask is None and end - start > 1
                piece = scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
                )
            else:
                piece = _explicit(q, k, v, mask, scaling, softcap, sinks)
            out[start:end] = piece[0].transpose(0, 1)
        return out.flatten(1)

    def _mask(self, rows: int, keys: int, window: int | None) -> Tensor | None:
        """Bottom-right causal mask [rows, keys] bool; None where the plain causal (or no) mask says the same."""
        window = None if window is None or window >= keys else window
        if window is None and rows in (1, keys):
            return None
        if (rows, keys, window) not in self._masks:
            place = torch.arange(keys, device=self.device)
            distance = place[keys - rows :, None] - place
            allowed = distance >= 0
            self._masks[rows, keys, window] = allowed if window is None else allowed & (distance < window)
        return self._masks[rows, keys, window]


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out, for score caps and sinks: q [1, Hq, R, D], k and v [1, Hkv, K, D] -> [1, Hq, R, D]."""
    _, heads, rows, _ = q.shape
    repeat = heads // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = cap(q @ k.transpose(-1, -2) * scaling, softcap)
    if mask is None:
        mask = torch.ones(rows, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - rows)
    scores = scores.masked_fill(~mask, -math.inf)
    extra = None if sinks is None else sinks.reshape(1, heads, 1, 1).expand(1, heads, rows, 1)
    return softmax(scores, extra).to(v.dtype) @ v
