"""Notice before a machine goes: the user's ``preemption_check``, which each rank polls.

Runs on the ranks; imports no framework.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch import timeouts

PreemptionCheck = Callable[[], Any]
"""Function without arguments that returns a true value once this machine is about to go."""


def callable_check(name: str, value: Any) -> PreemptionCheck:
    """Accept a function, on the driver.

    Raises
    ------
    ParamError
        If the value is no function.
    """
    if not callable(value):
        raise ParamError(
            f"{name}: expected a function without arguments that returns True once the machine "
            f"on which it runs is about to go, found {value!r}."
        )
    check: PreemptionCheck = value
    return check


@contextlib.contextmanager
def watching(check: PreemptionCheck | None, on_notice: Callable[[], object]) -> Iterator[None]:
    """Poll a check during the block, in another thread, until it returns a true value.

    An exception of the check counts as no notice, because a server of metadata may be busy. The
    first one is printed.

    Parameters
    ----------
    check : callable or None
        The check; None does nothing.
    on_notice : callable
        Called once, in that thread.
    """
    if check is None:
        yield
        return
    has_failed = False

    def is_noticed() -> bool:
        nonlocal has_failed
        try:
            if check():
                print("preemption_check: this machine is about to go.", file=sys.stderr)
                return True
        except Exception:
            if not has_failed:
                print("preemption_check raised an exception:", file=sys.stderr)
                traceback.print_exc()
            has_failed = True
        return False

    with polling(is_noticed, on_notice):
        yield


@contextlib.contextmanager
def polling(check: Callable[[], bool], on_notice: Callable[[], object]) -> Iterator[None]:
    """Poll during the block, in another thread, and call a function once if a check is true.

    Parameters
    ----------
    check : callable
        Raises no exception.
    on_notice : callable
        Called in that thread.
    """
    finished = threading.Event()

    def poll() -> None:
        while not finished.is_set():
            if check():
                on_notice()
                return
            finished.wait(timeouts.PREEMPTION_POLL)

    # The block does not wait for the thread: a check may wait for an answer for long.
    threading.Thread(target=poll, name="hvd_estimators preemption", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def sending_sigterm(check: PreemptionCheck | None) -> contextlib.AbstractContextManager[None]:
    """Poll a check during the block, and send this process SIGTERM on notice."""
    return watching(check, functools.partial(os.kill, os.getpid(), signal.SIGTERM))
