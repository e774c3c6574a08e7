"""Keeps a process as it was while an inference engine is made in it.

Such an engine seeds the global generators, overwrites environment variables and replaces functions of torch; the
trainer relies on all three.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved() -> Iterator[None]:
    """Puts generators, environment, thread functions and the default type back at the end."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    python, numpy, default = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    set_threads, benchmark = torch.set_num_threads, torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_default_dtype(default)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
