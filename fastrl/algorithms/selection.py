"""Exact selections over tokens that are spread over ranks, without gathering them.

The k-th largest of all ranks' values is found by a radix search: values become integers of the same order, and each
16-bit digit costs one histogram, summed over ranks. Ties are broken by further integer keys (sample id, position), so
that the choice does not depend on where a token lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DIGIT = 16
Reduce = Callable[[Tensor], Tensor]


class Key(NamedTuple):
    """Integers [T] in [0, 2^bits); larger is picked first."""

    values: Tensor
    bits: int


def same(x: Tensor) -> Tensor:
    """The sum over ranks when there is one."""
    return x


def descending(x: Tensor) -> Key:
    """A key that picks large floats first. Values are rounded to float32, so that ranks' last bits do not matter."""
    bits = (x.detach().float() + 0.0).contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return Key(torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31)), 32)


def ascending(x: Tensor, bits: int) -> Key:
    """A key that picks small non-negative integers first."""
    return Key((1 << bits) - 1 - x.long(), bits)


def kth_largest(key: Key, mask: Tensor, k: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """The k-th largest key under the mask over all ranks, and how many keys are larger. k is 0-d and at least 1."""
    remaining = k.double()
    found = torch.zeros((), dtype=torch.int64, device=mask.device)
    active = mask
    for shift in range(key.bits - DIGIT, -1, -DIGIT):
        digit = (key.values >> shift) & ((1 << DIGIT) - 1)
        histogram = torch.zeros(1 << DIGIT, dtype=torch.float64, device=mask.device)
        histogram = reduce(histogram.index_add_(0, digit, active.double()))
        from_top = histogram.flip(0).cumsum(0)
        place = torch.searchsorted(from_top, remaining.reshape(1))[0].clamp(max=(1 << DIGIT) - 1)
        chosen = (1 << DIGIT) - 1 - place
        remaining = remaining - (from_top[place] - histogram[chosen])
        active = active & (digit == chosen)
        found = (found << DIGIT) | chosen
    return found, k.double() - remaining


def pick(keys: Sequence[Key], mask: Tensor, k: Tensor | float, *, reduce: Reduce | None = None) -> Tensor:
    """The k first tokens of all ranks in the order of the keys, the first key counting most: [T] bool, this rank's.

    Args:
        keys: each [T]; together they should tell all tokens apart, otherwise equal ones are picked together.
        mask: [T] bool, what can be picked.
        k: how many over all ranks; all there are if fewer, none if it is below 1.
        reduce: sums a tensor over ranks; None when there is one.
    """
    reduce = reduce or same
    total = reduce(mask.double().sum().reshape(1))[0]
    k = torch.minimum(torch.as_tensor(k, dtype=torch.float64, device=mask.device).floor(), total)
    any_at_all = k >= 1
    remaining = k.clamp(min=1)
    active, picked = mask, torch.zeros_like(mask)
    for key in keys:
        threshold, above = kth_largest(key, active, remaining, reduce)
        picked = picked | (active & (key.values > threshold))
        active = active & (key.values == threshold)
        remaining = remaining - above
    return (picked | active) & any_at_all


def at_least_kth(x: Tensor, mask: Tensor, k: Tensor | float, *, reduce: Reduce | None = None) -> Tensor:
    """Every token whose value is at least the k-th largest of all ranks, ties included: [T] bool."""
    return pick([descending(x)], mask, k, reduce=reduce)
