"""Randomness by address: every uniform is a pure function of (seed of the sample, position of the token).

No generator state exists, so a sample does not depend on its neighbours, the batch size or the order of work, and a
resumed run draws what the uninterrupted one would have drawn. The mixing function is the finaliser of SplitMix64
(https://doi.org/10.1145/2660193.2660195), a bijection of 64-bit words.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: odd, close to 2^64 / golden ratio
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


def mix(x: np.ndarray) -> np.ndarray:
    """Words [...] uint64 -> words [...] uint64, one to one, every output bit depending on every input bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> _S30)) * _M1
        x = (x ^ (x >> _S27)) * _M2
        return x ^ (x >> _S31)


def _absorb(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return mix((state + _GAMMA) ^ mix(word + _GAMMA))


def sample_seed(seed: int, step: int, group_id: int, sample_index: int) -> int:
    """The seed of one sample of a training run: 0 <= result < 2**63, a hash of all four numbers."""
    state = np.zeros(1, np.uint64)
    for number in (seed, step, group_id, sample_index):
        state = _absorb(state, np.array([number & 0xFFFFFFFFFFFFFFFF], np.uint64))
    return int(state[0] >> np.uint64(1))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """seeds [S] uint64, positions [S] (0 = first response token) -> uniforms [S] float64 in [0, 1), 53 random bits."""
    words = _absorb(mix(seeds.astype(np.uint64) + _GAMMA), positions.astype(np.uint64))
    return (words >> _S11).astype(np.float64) * 2.0**-53
