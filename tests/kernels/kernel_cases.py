"""Inputs shared by the kernel tests: odd ragged shapes, masks with holes, garbage outside the masks; and tolerances."""

from __future__ import annotations

import os

import numpy as np
import torch

from fastrl.kernels.dispatch import interpreting

# True in the process where every op runs its Triton kernel in the interpreter
TRITON = os.environ.get("FASTRL_KERNELS") == "triton" and interpreting()

# largest error allowed, relative to max(1, |expected|): one table, no switch. float32 results of float32 sums.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

# sequence lengths: empty ones first, in the middle and last, one token, neighbours of block sizes, one long
LENGTHS = [0, 5, 1, 0, 17, 64, 33, 130, 0]


def offsets_of(lengths):
    return [0, *np.cumsum(lengths).tolist()]


def cu(lengths, dtype=torch.int32):
    return torch.tensor(offsets_of(lengths), dtype=dtype)


def mask_of(total, seed, keep=0.7):
    """bool [total] with holes."""
    return np.random.default_rng(seed).random(total) < keep


def normal(total, seed, scale=1.0):
    return np.random.default_rng(seed).normal(size=total) * scale


def poisoned(x, mask, dtype=torch.float32):
    """A tensor with NaN, Inf and huge values where the mask is off."""
    garbage = np.resize([np.nan, np.inf, -np.inf, 3e38], len(x))
    return torch.from_numpy(np.where(mask, x, garbage)).to(dtype)


def seen(x):
    """What a float64 oracle has to be fed: the values after rounding to the tensor's dtype."""
    return x.detach().to(torch.float64).numpy()


def close(got, want, dtype=torch.float32, factor=1.0):
    """Assert equality within the table; NaN in `got` fails."""
    got = got.detach().to(torch.float64).numpy() if isinstance(got, torch.Tensor) else np.asarray(got, dtype=np.float64)
    want = np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    same = got == want
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want) / np.maximum(1.0, np.abs(want)))
    worst = float(np.max(error, initial=0.0)) if not np.isnan(error).any() else float("nan")
    assert worst <= factor * TOLERANCE[dtype], f"error {worst:.3g} above {factor * TOLERANCE[dtype]:.3g}"
