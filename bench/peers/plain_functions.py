"""Plain torch, for trying the machinery out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def softmax(d: dict[str, torch.Tensor], dim: int) -> Callable[[], Any]:
    return lambda: torch.softmax(d["x"], dim)
