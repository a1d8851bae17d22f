"""Horovod's timeline of a fit, gathered into the run's logs. Runs in the ranks."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
from pathlib import Path

from hvd_estimators.launch.events.timeline import TIMELINE_VARIABLE, timeline_path
from hvd_estimators.store.base import Store

__all__ = ["gather_timeline"]

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
