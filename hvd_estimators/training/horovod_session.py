"""The Horovod session of a rank: initialisation and seeds."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def horovod_session(
    hvd: Any, mp_start_method: str | None, ranks: int | None = None
) -> Iterator[None]:
    """Initialise Horovod for the duration of the block.

    Parameters
    ----------
    hvd : module
        The framework's part of Horovod, such as ``horovod.torch``.
    mp_start_method : str or None
        Start method of ``multiprocessing``; None does not change it.
    ranks : int, optional
        Number of ranks among which the rows were divided.

    Raises
    ------
    RuntimeError
        If the number of ranks differs from ``ranks``.
    """
    set_start_method(mp_start_method)
    with _process_sets_of(hvd):
        hvd.init()
        try:
            check_ranks(hvd.size(), ranks)
            yield
        finally:
            hvd.shutdown()


def set_start_method(name: str | None) -> None:
    """Set the start method of ``multiprocessing``; None does not change it."""
    if name:
        multiprocessing.set_start_method(name, force=True)


def check_ranks(size: int, ranks: int | None) -> None:
    """Check that as many ranks have met as the rows were divided among.

    Parameters
    ----------
    size : int
        Number of ranks that have met.
    ranks : int or None
        Number of ranks among which the rows were divided, if known.

    Raises
    ------
    RuntimeError
        If the numbers differ.
    """
    if ranks is not None and size != ranks:
        raise RuntimeError(
            f"The backend's num_processes() returned {ranks} ranks, and {size} have met. Start as "
            "many processes with Horovod's environment variables, as horovodrun does."
        )


@contextlib.contextmanager
def _process_sets_of(hvd: Any) -> Iterator[None]:
    """Bind Horovod's process sets to one framework for the duration of the block.

    Horovod has one module for process sets. It belongs to the framework whose part of Horovod was
    imported last. While the ranks train, a user's module may import the part of another framework,
    which has no ranks.
    """
    from horovod.common import process_sets

    set_up, own = process_sets._setup, hvd.mpi_ops._basics
    is_within = True

    def set_up_outside(basics: Any) -> None:
        if not is_within:
            set_up(basics)

    set_up(own)
    process_sets._setup = set_up_outside
    try:
        yield
    finally:
        is_within = False
        process_sets._setup = set_up


def rank_seed(seed: int, rank: int, epoch: int = 0) -> int:
    """Return the seed of a rank's own random numbers in an epoch.

    Ranks have different seeds, so that they draw different dropout masks. Each epoch has a
    different seed, so that a resumed run draws the same numbers as an uninterrupted one.

    Parameters
    ----------
    seed : int
        Seed of the run, 0 or more, the same on all ranks (``spec.data.random_seed``, which the
        driver draws if the user does not set it).
    rank : int
        This rank.
    epoch : int
        The epoch, from 0.

    Returns
    -------
    int
        A non-negative number of 32 bits.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(rank, epoch))
    return int(sequence.generate_state(1)[0])


def seed_rank(seed: int, rank: int, epoch: int = 0) -> int:
    """Seed Python's and NumPy's random numbers, and return the seed for the framework's.

    See `rank_seed` for the parameters and the result.
    """
    own = rank_seed(seed, rank, epoch)
    random.seed(own)
    np.random.seed(own)
    return own
