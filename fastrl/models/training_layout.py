"""The layout of a training micro-batch: a prompt reads itself, a response reads its prompt and itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Segment = tuple[int, int, int, int]  # rows [start, end), keys of rows [prefix_start, prefix_end) before their own


class TrainingLayout:
    """SDPA per segment."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        self.device = device

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
        outputs = []
        for start, end, prefix_start, prefix_end in self.segments:
            q = query[:, :, start:end]
            prefix = prefix_end - prefix_start
            k, v = key[:, :, start:end], value[:, :, start:end]
            if prefix:
                k = torch.cat([key[:, :, prefix_start:prefix_end], k], dim=2)
                v = torch.cat([value[:, :, prefix_start:prefix_end], v], dim=2)
            distance = torch.arange(prefix, prefix + end - start)[:, None] - torch.arange(k.shape[2])
            mask = (distance >= 0).to(q.device)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
            outputs.append(out)
        return torch.cat(outputs, dim=2).transpose(1, 2)
