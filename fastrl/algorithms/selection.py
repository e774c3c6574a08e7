"""Exact selections over tokens that are spread over ranks, without gathering them.

The k-th largest of all ranks' values is found by a radix search: values become integers of the same order, and each
16-bit digit costs one histogram, summed over ranks. Ties are broken by further integer keys (sample id, position), so
that the choice does not depend on where a token lives. Every rank takes part in the same number of sums, whatever it
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DIGIT = 16
Reduce = Callable[[Tensor], Tensor]
Key = Callable[[Tensor], tuple[Tensor, int]]  # flat indices [n] -> integers [n] in [0, 2^bits), bits; larger goes first


def same(x: Tensor) -> Tensor:
    """The sum over ranks when there is one."""
    return x


def descending(x: Tensor) -> Key:
    """A key that picks large floats first. Values are rounded to float32, so that ranks' last bits do not matter."""

    def key(index: Tensor) -> tuple[Tensor, int]:
        bits = (x.detach()[index].float() + 0.0).view(torch.int32).long() & 0xFFFFFFFF
        return torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31)), 32

    return key


def ascending(values: Callable[[Tensor], Tensor], bits: int) -> Key:
    """A key that picks small non-negative integers first; `values` gives them for flat indices."""

    def key(index: Tensor) -> tuple[Tensor, int]:
        return (1 << bits) - 1 - values(index).long(), bits

    return key


def kth_largest(values: Tensor, bits: int, k: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """The k-th largest value of all ranks, and how many are larger: values [n] int64 below 2^bits, k 0-d >= 1."""
    remaining = k.double()
    found = torch.zeros((), dtype=torch.int64, device=values.device)
    for shift in range(bits - DIGIT, -1, -DIGIT):
        digit = (values >> shift) & ((1 << DIGIT) - 1)
        histogram = reduce(torch.bincount(digit, minlength=1 << DIGIT).double())
        from_top = histogram.flip(0).cumsum(0)
        place = torch.searchsorted(from_top, remaining.reshape(1))[0].clamp(max=(1 << DIGIT) - 1)
        chosen = (1 << DIGIT) - 1 - place
        remaining = remaining - (from_top[place] - histogram[chosen])
        values = values[digit == chosen]
        found = (found << DIGIT) | chosen
    return found, k.double() - remaining


def pick(keys: Sequence[Key], mask: Tensor, k: Tensor | float, *, reduce: Reduce | None = None) -> Tensor:
    """The k first tokens of all ranks in the order of the keys, the first key counting most: [T] bool, this rank's.

    Args:
        keys: together they should tell all tokens apart, otherwise equal ones are picked together.
        mask: [T] bool, what can be picked.
        k: how many over all ranks; all there are if fewer, none if it is below 1.
        reduce: sums a tensor over ranks; None when there is one.
    """
    reduce = reduce or same
    index = mask.nonzero()[:, 0]
    total = reduce(torch.full((1,), float(index.numel()), dtype=torch.float64, device=mask.device))[0]
    k = torch.minimum(torch.as_tensor(k, dtype=torch.float64, device=mask.device).floor(), total)
    remaining = k.clamp(min=1)
    picked = torch.zeros_like(mask)
    for key in keys:
        values, bits = key(index)
        threshold, above = kth_largest(values, bits, remaining, reduce)
        picked[index[values > threshold]] = True
        index = index[values == threshold]
        remaining = remaining - above
    picked[index] = True
    return picked & (k >= 1)


def at_least_kth(x: Tensor, mask: Tensor, k: Tensor | float, *, reduce: Reduce | None = None) -> Tensor:
    """Every token whose value is at least the k-th largest of all ranks, ties included: [T] bool."""
    return pick([descending(x)], mask, k, reduce=reduce)
