"""A word to the driver where ranks make no progress for long, which may be right. In the ranks."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

from hvd_estimators.launch.rank.liveness import seconds_without_progress

__all__ = ["warning_of_hangs"]

# As long as no first batch, validation or checkpoint takes, mostly.
_SECONDS = 1800.0
_LOOK_SECONDS = 10.0
_FRAMES = 6


@contextlib.contextmanager
def warning_of_hangs(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell once, in the block, of each time that this rank makes no progress for half an hour.

    Parameters
    ----------
    tell : callable
        Called with a text, from another thread: for how long, and where the main thread is.
    """
    ended = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        is_told = False
        while not ended.wait(min(_LOOK_SECONDS, _SECONDS / 2)):
            silent = seconds_without_progress()
            if silent < _SECONDS:
                is_told = False
            elif not is_told:
                is_told = True
                tell(_text(silent, main))

    thread = threading.Thread(target=watch, name="hvd_estimators hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _text(silent: float, thread: int) -> str:
    frame = sys._current_frames().get(thread)
    stack = "" if frame is None else "".join(traceback.format_stack(frame)[-_FRAMES:])
    return (
        f"Rank 0 has made no progress for {silent:.0f} s: there was no batch and no end of an "
        f"epoch. It is here, the innermost call last:\n{stack.rstrip()}"
    )
