"""Randomness by address: every uniform is a pure function of (seed of the sample, position of the token).

No generator state exists, so a sample does not depend on its neighbours, the batch size or the order of work, and a
resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import numpy as np
import torch

from fastrl.algorithms.counter_random import random_bits, uniform

_63_BITS = (1 << 63) - 1


def sample_seed(seed: int, step: int, group_id: int, sample_index: int) -> int:
    """The seed of one sample of a training run: 0 <= result < 2**63, a hash of all four numbers."""
    return int(random_bits(seed, step, group_id, sample_index)) & _63_BITS


def sample_seeds(seed: int, step: int, group_id: int, num_samples: int) -> list[int]:
    """`sample_seed` of the indices 0 .. num_samples - 1."""
    return (random_bits(seed, step, group_id, torch.arange(num_samples)) & _63_BITS).tolist()


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """seeds [S] int64, positions [S] int64 (0 = first response token) -> uniforms [S] float64 in [0, 1)."""
    return uniform(0, torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
