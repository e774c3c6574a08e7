"""How statistics of each kind merge on a rank, over ranks, and into the number that is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Slots = list[Any]  # numbers on the host, or 0-d float64 tensors on any device


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64))
    return max(a, b)


def _add(a: Slots, b: Slots) -> Slots:
    return [x + y for x, y in zip(a, b)]


def _maximum(a: Slots, b: Slots) -> Slots:
    return [_larger(x, y) for x, y in zip(a, b)]


def _merge_moments(a: Slots, b: Slots) -> Slots:
    """Chan's update of (count, mean, sum of squared deviations), then (-min, max)."""
    count = a[0] + b[0]
    weight = b[0] / (count + (count == 0))
    delta = b[1] - a[1]
    mean = a[1] + delta * weight
    squares = a[2] + b[2] + delta * delta * a[0] * weight
    return [count, mean, squares, _larger(a[3], b[3]), _larger(a[4], b[4])]


def _mean(s: list[float]) -> float | None:
    return s[0] / s[1] if s[1] > 0 else None


def _sum(s: list[float]) -> float | None:
    return s[0] if s[1] > 0 else None


def _extreme(s: list[float]) -> float | None:
    return None if s[0] == -math.inf else s[0]


def _lowest(s: list[float]) -> float | None:
    return None if s[0] == -math.inf else -s[0]


def _value(s: list[float]) -> float | None:
    return None if s[1] == -math.inf else s[1]


def _effective_sample_size(s: list[float]) -> float | None:
    """(sum w)^2 / (n sum w^2)."""
    n, total, squares = s
    return total * total / (n * squares) if n > 0 and squares > 0 else None


def _pearson(s: list[float]) -> float | None:
    n, x, y, xx, yy, xy = s
    if n < 2:
        return None
    spread = (xx - x * x / n) * (yy - y * y / n)
    return (xy - x * y / n) / math.sqrt(spread) if spread > 0 else None


def _explained_variance(s: list[float]) -> float | None:
    """1 - Var(error) / Var(target)."""
    n, target, target_sq, error, error_sq = s
    variance = target_sq - target * target / n if n > 0 else 0.0
    # The sums carry float64 rounding: a constant target must not turn into a variance of 1e-17.
    if variance <= 1e-12 * max(target_sq, 1e-30):
        return None
    return 1.0 - (error_sq - error * error / n) / variance


# kind -> (how two of the same name merge on a rank, how ranks merge, what is shown)
Kind = tuple[Callable[[Slots, Slots], Slots], Callable[[Slots, Slots], Slots], Callable[[list[float]], float | None]]
KINDS: dict[str, Kind] = {
    "mean": (_add, _add, _mean),
    "sum": (_add, _add, _sum),
    "max": (_maximum, _maximum, _extreme),
    "min": (_maximum, _maximum, _lowest),  # stored negated
    "value": (lambda a, b: b, _maximum, _value),
    "slowest": (_add, _maximum, _extreme),
    "ess": (_add, _add, _effective_sample_size),
    "pearson": (_add, _add, _pearson),
    "explained_variance": (_add, _add, _explained_variance),
    "moments": (_merge_moments, _merge_moments, _mean),
}
EMPTY: dict[str, list[float]] = {
    "mean": [0.0, 0.0],
    "sum": [0.0, 0.0],
    "max": [-math.inf],
    "min": [-math.inf],
    "value": [-math.inf, -math.inf],
    "slowest": [-math.inf],
    "ess": [0.0] * 3,
    "pearson": [0.0] * 6,
    "explained_variance": [0.0] * 5,
    "moments": [0.0, 0.0, 0.0, -math.inf, -math.inf],
}

SAME_TWICE = ("max", "min", "value", "slowest")  # kinds that a second copy of the same contribution does not change
