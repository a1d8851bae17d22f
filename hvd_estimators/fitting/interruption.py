"""SIGTERM to the driver while a fit runs: it cleans up, as it does when the user interrupts it."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["ending_by_sigterm"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the block, and then the program, by `SystemExit`. Runs on the driver.

    By itself the signal ends a process on the spot, and nobody notes what became of the run. The
    exit status is what a shell tells of such an end, 143. Does nothing where the program handles
    the signal itself, and in threads that get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    # Once: who sends another one does not want to wait.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logger.warning("The driver was asked to end (SIGTERM).")
    raise SystemExit(128 + number)
