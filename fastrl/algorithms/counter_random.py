"""Random numbers that are a pure function of their address, such as (seed, update, sample, position).

A draw never depends on the rank, the split or the order it is made in. Each counter is folded in by the finaliser of
SplitMix64 (https://doi.org/10.1145/2660193.2660195), in wrapping 64-bit integer arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
Counter = int | Tensor


def signed(x: int) -> int:
    """The 64-bit pattern of x as a signed number, which is what int64 tensors hold."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >= 1 << 63 else x


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """A bijection of 64-bit words in which every input bit moves about half of the output bits."""
    x = (x ^ shifted(x, 30)) * signed(FIRST)
    x = (x ^ shifted(x, 27)) * signed(SECOND)
    return x ^ shifted(x, 31)


def random_bits(seed: int, *counters: Counter, device: torch.device | str | None = None) -> Tensor:
    """64 random bits for every address: int64, the broadcast shape of the counters.

    Args:
        seed: any integer.
        counters: integers or int64 tensors that broadcast; the order of counters matters.
        device: where the result lives when no counter is a tensor.
    """
    where = next((c.device for c in counters if isinstance(c, Tensor)), device)
    state = mixed(torch.tensor(signed(seed + GOLDEN), dtype=torch.int64, device=where))
    for counter in counters:
        word = counter.long() if isinstance(counter, Tensor) else torch.tensor(signed(counter), device=where)
        state = mixed(state * signed(FIRST) ^ mixed(word + signed(GOLDEN)))
    return state


def uniform(seed: int, *counters: Counter, device: torch.device | str | None = None) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits, float64; arguments as `random_bits`."""
    return shifted(random_bits(seed, *counters, device=device), 11).double() * 2.0**-53
