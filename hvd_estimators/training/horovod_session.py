"""The Horovod session of a rank: initialisation, seeds and timeline."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd_estimators.exceptions import TrainingInterruptedError
from hvd_estimators.launch.rendezvous.parent import tell_parent
from hvd_estimators.launch.service.timeline import TIMELINE_VARIABLE, timeline_path
from hvd_estimators.store.base import Store

__all__ = ["gather_timeline", "horovod_session", "rank_seed", "seed_rank"]

logger = logging.getLogger(__name__)


def gather_timeline(store: Store, logs_path: str | None) -> None:
    """Copy the timeline that Horovod writes into a run's logs when this process ends.

    Call this before ``hvd.init()``: Horovod writes the end of the file when the process ends, in a
    function that it registers there, and those that were registered before are called after it.

    Parameters
    ----------
    store : Store
        Keeps the logs.
    logs_path : str or None
        Their directory; None where the store keeps no runs.
    """
    path = timeline_path(os.environ)
    # Horovod's rank 0 writes the events of all ranks, and the others nothing.
    if path is None or os.environ.get("HOROVOD_RANK", "0") != "0":
        return
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("%s: %r cannot be written: %s", TIMELINE_VARIABLE, path, error)
    if logs_path is not None:
        atexit.register(_copy, os.path.abspath(path), store, logs_path)


def _copy(path: str, store: Store, logs_path: str) -> None:
    try:
        number = 0
        while store.exists(target := f"{logs_path}/timeline{f'-{number}' if number else ''}.json"):
            number += 1  # of a run that was gone on with
        with open(path, "rb") as file, store.open_atomic(target) as stored:
            shutil.copyfileobj(file, stored, 2**20)
    except OSError as error:
        logger.warning("%s: %r is not in the run's logs: %s", TIMELINE_VARIABLE, path, error)


@contextlib.contextmanager
def horovod_session(
    hvd: Any, mp_start_method: str | None, ranks: int | None = None
) -> Iterator[None]:
    """Be one of Horovod's ranks until the block ends.

    Parameters
    ----------
    hvd : module
        The framework's part of Horovod, such as ``horovod.torch``.
    mp_start_method : str or None
        Start method of ``multiprocessing``; None leaves it as it is.
    ranks : int, optional
        The number of ranks among which the rows were shared out.

    Raises
    ------
    RuntimeError
        If there is another number of ranks.
    """
    if mp_start_method:
        multiprocessing.set_start_method(mp_start_method, force=True)
    with _process_sets_of(hvd):
        hvd.init()
        with _among_ranks(hvd, ranks):
            yield


@contextlib.contextmanager
def _among_ranks(hvd: Any, ranks: int | None) -> Iterator[None]:
    """Tell the parent of this rank when it has joined the others, and when it leaves them."""
    is_asked_to_end = False
    try:
        # From here on no other process can become a rank of this job.
        if not _adds_process_sets():
            tell_parent("joined")
        if ranks is not None and hvd.size() != ranks:
            raise RuntimeError(
                f"The backend's num_processes() told of {ranks} ranks, and Horovod finds "
                f"{hvd.size()}. Start as many processes with Horovod's environment variables, as "
                "horovodrun does."
            )
        yield
    except TrainingInterruptedError:
        is_asked_to_end = True
        raise
    finally:
        hvd.shutdown()
        # The parent of who is asked to end may have gone, and would be tried for a minute.
        if not is_asked_to_end and not _adds_process_sets():
            tell_parent("left")


@contextlib.contextmanager
def _process_sets_of(hvd: Any) -> Iterator[None]:
    """Let Horovod's process sets be those of one framework until the block ends.

    Horovod has one module of them, which belongs to the framework whose part was imported last. A
    user's module may import another one's while the ranks train, which has no ranks.
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


def _adds_process_sets() -> bool:
    """Return whether Horovod was told that process sets, which ranks join, are added later."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")


def rank_seed(seed: int, rank: int, epoch: int = 0) -> int:
    """Return the seed of a rank's own random numbers in an epoch.

    Ranks have different seeds, so that they do not draw the same dropout masks. Epochs have seeds
    of their own, so that a resumed run draws what an uninterrupted one does.

    Parameters
    ----------
    seed : int
        Seed of the run, 0 or more, the same on all ranks (``spec.data.random_seed``, which is drawn
        on the driver where the user sets none).
    rank : int
        This rank.
    epoch : int
        The epoch, from 0.

    Returns
    -------
    int
        32 bits, not negative.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(rank, epoch))
    return int(sequence.generate_state(1)[0])


def seed_rank(seed: int, rank: int, epoch: int = 0) -> int:
    """Seed Python's and NumPy's random numbers, and return the seed for the framework's.

    See `rank_seed` for what is given and returned.
    """
    own = rank_seed(seed, rank, epoch)
    random.seed(own)
    np.random.seed(own)
    return own
