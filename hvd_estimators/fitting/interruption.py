"""Fits that are interrupted, on the driver: SIGTERM, and what killed ranks have left."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.checkpoint_names import leftovers

__all__ = ["ending_by_sigterm", "without_leftovers"]

# Longer than ranks are waited for.
_SECONDS = 60.0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the block, and then the program, by `SystemExit`. Runs on the driver.

    By itself the signal ends a process on the spot, and nobody notes what became of the run. The
    exit status is what a shell tells of such an end, 143. Does nothing where the program handles
    the signal itself, and in threads that get no signals. Not for blocks that wait for Spark: a
    call to the JVM that is interrupted blocks the next one. Should that happen all the same, the
    signal ends the process a minute later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    late = threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    late.daemon = True

    def end(number: int, frame: FrameType | None) -> None:
        # Once: who sends another one does not want to wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        late.start()
        logger.warning("The driver was asked to end (SIGTERM).")
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        late.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def without_leftovers(store: Store, run: RunPaths, is_lost: Callable[[], bool]) -> Iterator[None]:
    """Delete what ranks have left of checkpoints, when the block ends by an error or interrupt.

    Parameters
    ----------
    store : Store
        Keeps the run.
    run : RunPaths
        The run, which is this fit's.
    is_lost : callable
        Returns whether somebody else trains it by now.
    """
    try:
        yield
    except BaseException:
        directory = run.checkpoints_path
        if directory is not None and not is_lost():
            try:
                for name in leftovers(run.checkpoint_filename, store.names(directory)):
                    store.delete(f"{directory}/{name}")
            except OSError as error:
                logger.warning("What ranks have left could not be deleted: %s", error)
        raise
