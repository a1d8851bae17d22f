"""Warn the driver when a rank makes no progress, with the place where it waits. In the ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

from hvd_estimators.launch.rank.liveness import leave_stack, seconds_without_progress
from hvd_estimators.launch.rank.stalls import hang_limit

__all__ = ["stack_of", "warning_of_hangs"]

# Most steps and validation batches take less; Horovod warns of stalled ranks after a minute.
_SECONDS = 120.0
_LOOK_SECONDS = 10.0
_FRAMES = 8


@contextlib.contextmanager
def warning_of_hangs(rank: int, notify: Callable[[str], None]) -> Iterator[None]:
    """Report once, in the block, each time that this rank makes no progress for two minutes.

    The stack of the main thread is also left for the parent, which adds it to its error if it ends
    the rank.

    Parameters
    ----------
    rank : int
        This rank.
    notify : callable
        Called with a text, from another thread.
    """
    ended = threading.Event()
    main = threading.get_ident()
    # Before the parent ends the rank.
    patience = min(_SECONDS, hang_limit(os.environ) / 2)

    def watch() -> None:
        is_reported = False
        while not ended.wait(min(_LOOK_SECONDS, patience / 2)):
            silent = seconds_without_progress()
            if silent < patience:
                is_reported = False
                continue
            stack = stack_of(main)
            leave_stack(stack)
            if silent >= _SECONDS and not is_reported:
                is_reported = True
                notify(
                    f"Rank {rank} has made no progress for {silent:.0f} s: there was no batch and "
                    f"no end of an epoch. It waits here, the innermost call last:\n{stack}"
                )

    thread = threading.Thread(target=watch, name="hvd_estimators hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def stack_of(thread: int) -> str:
    """Return the innermost calls of a thread, given its identifier."""
    frame = sys._current_frames().get(thread)
    calls = [] if frame is None else traceback.format_stack(frame)[-_FRAMES:]
    return "".join(calls).rstrip()
