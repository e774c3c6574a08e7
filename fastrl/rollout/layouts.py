"""What both layouts of generation share: the hook that a model's attention layers call, caps, and the softmax.

A layout is given to a model as `fastrl_layout=` (see models/attention.py). Its work is done by `attend_rows` on one
buffer of the new tokens' queries, keys and values, which is what the fast forward pass has in hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class RowsLayout(ABC):
    """Turns the call of a Hugging Face attention layer into `attend_rows`."""

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
        """query [1, Hq, M, D], key [1, Hkv, M, D], value [1, Hkv, M, Dv] -> [1, M, Hq, Dv]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        width = value.shape[-1]
        if width != key.shape[-1]:  # stored as wide as the keys, the rest is zero and cut off again
            value = pad(value, (0, key.shape[-1] - width))
        qkv = torch.cat([query, key, value], dim=1)[0].transpose(0, 1)
        out = self.attend_rows(layer, qkv, query.shape[1], scaling, sliding_window, softcap, sinks)
        return out.unflatten(-1, (query.shape[1], -1))[None, ..., :width]

    @abstractmethod
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
        """qkv [M, Hq + 2 Hkv, D], the new tokens' queries, keys and values -> [M, Hq D]; keys and values are kept."""


def autocast(qkv: Tensor) -> Tensor:
    """The tensor in autocast's type where autocast is on, so that keys and values are stored in it."""
    kind = qkv.device.type
    return qkv.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else qkv


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(scores / softcap)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension in float32 or wider, with one more logit that takes mass and has no value."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    return torch.softmax(torch.cat([scores, sinks.to(scores.dtype)], dim=-1), dim=-1, dtype=dtype)[..., :-1]
