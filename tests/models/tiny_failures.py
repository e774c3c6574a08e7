"""Policy losses that fail on rank 1 in the second step, for tests that name them in configurations."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from fastrl.algorithms.losses.base import TokenLoss

_calls = 0


def _plain(log_prob, old_log_prob, advantages):
    return TokenLoss(-(log_prob - old_log_prob).exp() * advantages)


def _second_step_of_rank_1() -> bool:
    global _calls
    _calls += 1
    return dist.is_initialized() and dist.get_rank() == 1 and _calls > 1


def raises(log_prob, old_log_prob, advantages):
    """An exception of its own."""
    if _second_step_of_rank_1():
        raise ValueError("broken on purpose")
    return _plain(log_prob, old_log_prob, advantages)


def dies(log_prob, old_log_prob, advantages):
    """Killed, as the system does when memory runs out."""
    if _second_step_of_rank_1():
        os.kill(os.getpid(), signal.SIGKILL)
    return _plain(log_prob, old_log_prob, advantages)


def hangs(log_prob, old_log_prob, advantages):
    """Never comes to the next collective."""
    if _second_step_of_rank_1():
        time.sleep(3600)
    return _plain(log_prob, old_log_prob, advantages)


def out_of_memory(log_prob, old_log_prob, advantages):
    """What a full GPU raises."""
    if _second_step_of_rank_1():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore text")
    return _plain(log_prob, old_log_prob, advantages)


def slow(log_prob, old_log_prob, advantages):
    """Takes a moment, so that a test can send a signal."""
    time.sleep(0.3)
    return _plain(log_prob, old_log_prob, advantages)
