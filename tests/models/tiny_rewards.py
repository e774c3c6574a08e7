"""Reward functions that tests name in configurations."""

from __future__ import annotations

import math
import time


def parity(prompt, response, answer, **extra):
    """1 for responses with an even sum of character codes: varies inside every group."""
    return float(sum(map(ord, response)) % 2 == 0)


def constant(prompt, response, answer, **extra):
    """Equal for everybody."""
    return 1.0


def raises(prompt, response, answer, **extra):
    """Fails for every sample."""
    raise ValueError("broken on purpose")


def raises_sometimes(prompt, response, answer, **extra):
    """Fails for about one sample in eight."""
    if sum(map(ord, response)) % 8 == 0:
        raise ValueError("broken on purpose")
    return parity(prompt, response, answer)


def nothing(prompt, response, answer, **extra):
    """Abstains."""
    return


def nan(prompt, response, answer, **extra):
    """Not a number."""
    return math.nan


def text(prompt, response, answer, **extra):
    """A string."""
    return "good"


def hangs(prompt, response, answer, **extra):
    """Never comes back."""
    time.sleep(3600)


def slow(prompt, response, answer, **extra):
    """Takes a moment, so that a test can interrupt it."""
    time.sleep(0.5)
    return parity(prompt, response, answer)
