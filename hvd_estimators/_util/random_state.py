"""Global random states, which trials and copies of the user's objects must not change."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np

_lock = threading.RLock()


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore Python's and NumPy's random states after the block.

    The states belong to the whole process, and fits of a grid run in several threads. So only one
    thread at a time can be in the block.
    """
    with _lock:
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def kept_random_state_with_torch() -> Iterator[None]:
    """Restore the random states of Python, NumPy and an imported torch after the block."""
    torch = sys.modules.get("torch")
    of_torch = contextlib.nullcontext() if torch is None else torch.random.fork_rng(devices=[])
    with kept_random_state(), of_torch:
        yield


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the random numbers of Python, NumPy and an imported torch, and restore their states.

    With None, the block continues with the states from before.
    """
    if seed is None:
        yield
        return
    torch = sys.modules.get("torch")
    with kept_random_state_with_torch():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch is not None:
            torch.manual_seed(seed)
        yield
