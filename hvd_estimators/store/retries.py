"""Retries of storage operations after transient errors, such as network failures or busy servers.

Storage clients retry only for a few seconds. These retries are for longer outages, such as a server
restart or throttling. Runs on the driver and on ranks.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from hvd_estimators.exceptions import HvdEstimatorsError
from hvd_estimators.store.redaction import redacted
from hvd_estimators.store.storage_errors import REMEDIES, Kind, kind_of, text_of, typed_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 60.0
"""Duration of retries, from the first failure on."""

_EXIT_SECONDS = 3.0
"""Duration of retries at interpreter exit."""

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
_WARN_AFTER = 1.0
_MOST_CHARACTERS = 400
"""Maximum characters of an error text in messages. HDFS data nodes send very long texts."""


class TruncatedResponse(ConnectionError):
    """Response with fewer bytes than the storage has. A retry may return all of them."""

    def __init__(self, length: int, expected: int, start: int, size: int) -> None:
        super().__init__(
            f"the response was cut: it has {length} of {expected} bytes at {start}, and the file "
            f"has {size} bytes"
        )


def with_retries(action: Callable[[], T], description: str, secrets: Collection[str] = ()) -> T:
    """Call a function, and retry it while its errors are transient.

    Refused, reset or timed-out connections, server errors and throttling are transient; see
    `kind_of`. So is the safe mode of a name node that starts. A retry does not help if files,
    credentials, permissions or space are missing.

    The delays between calls grow and are partly random, so that many ranks do not retry at the same
    time. A warning is logged if the function still fails after more than a second.

    Parameters
    ----------
    action : callable
        Called again after a failure; must be restartable.
    description : str
        Description of the action with its path, for messages: ``"reading 's3://bucket/key'"``.
    secrets : collection of str
        Texts that messages must not contain.

    Raises
    ------
    StoreUnavailableError
        If the function keeps failing for `RETRY_SECONDS`.
    StoreError
        If credentials, permissions or space are missing. Also in place of other errors of a client
        and of any error whose text contains a secret. A missing file is always a FileNotFoundError.
        All other errors are raised unchanged.
    """
    wait, failed_at, warned = _FIRST_WAIT, None, False
    while True:
        try:
            return action()
        except HvdEstimatorsError:
            raise
        except Exception as error:
            now = time.monotonic()
            failed_at = now if failed_at is None else failed_at
            is_transient = kind_of(error) is Kind.TRANSIENT
            if not is_transient or now - failed_at >= RETRY_SECONDS:
                tries = f", tried again for {now - failed_at:.0f} seconds" if is_transient else ""
                _raise_typed(error, description, secrets, tries)
            if not warned and now - failed_at >= _WARN_AFTER:
                warned = True
                logger.warning(
                    "%s fails (%s). It is tried again for up to %g seconds.",
                    description[:1].upper() + description[1:],
                    redacted(_text(error), secrets),
                    RETRY_SECONDS,
                )
        time.sleep(min(wait * random.uniform(0.5, 1), RETRY_SECONDS))
        wait = min(wait * 2, _LONGEST_WAIT)


@contextlib.contextmanager
def typed_errors(description: str) -> Iterator[None]:
    """Convert permission and disk-space errors of a block to `StoreError`.

    For blocks that cannot be retried because other code writes in them.

    Raises
    ------
    StoreError
        If permissions or space are missing.
    """
    try:
        yield
    except HvdEstimatorsError:
        raise
    except OSError as error:
        if kind_of(error) not in (Kind.FORBIDDEN, Kind.FULL):
            raise
        _raise_typed(error, description)


def at_exit(function: Callable[[bool], None]) -> None:
    """Call a function twice at interpreter exit: with False, and with True at the very end.

    The first call comes before Python waits for the threads that are not daemons, see `is_awaited`.
    The standard library's `atexit` functions run after the interpreter has stopped allowing new
    threads. From then on, fsspec's filesystems cannot resolve host names. They would fail if their
    connections had been idle for some seconds, and retry for a minute.
    """

    def call(is_last: bool) -> None:
        global RETRY_SECONDS
        before, RETRY_SECONDS = RETRY_SECONDS, min(RETRY_SECONDS, _EXIT_SECONDS)
        function(is_last)
        # The shorter limit also applies to retries that are running in other threads.
        if not is_last and any(map(is_awaited, threading.enumerate())):
            RETRY_SECONDS = before

    # The most recently registered function runs first. This one must run before the function that
    # joins the threads, which `concurrent.futures.thread` registers when it is imported.
    threading._register_atexit(call, False)  # type: ignore[attr-defined]
    # For threads that were awaited, and interpreters that exit without waiting.
    atexit.register(call, True)


def is_awaited(thread: threading.Thread) -> bool:
    """Return whether Python waits for a thread before it exits."""
    return thread.is_alive() and not thread.daemon and thread is not threading.main_thread()


def _raise_typed(
    error: Exception, description: str, secrets: Collection[str] = (), tries: str = ""
) -> None:
    kind, text = kind_of(error), _text(error)
    shown = redacted(text, secrets)
    # A traceback also prints the text of the cause.
    cause = error if shown == text else None
    is_known = isinstance(error, OSError) or type(error).__module__ == "builtins"
    if kind not in REMEDIES and cause is not None and is_known:
        raise error
    if kind is Kind.MISSING:
        raise FileNotFoundError(shown) from cause
    raise typed_error(kind, f"The store failed at {description}", shown + tries) from cause


def _text(error: BaseException) -> str:
    """Return the class and text of an error and of its causes."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 3:
        text = text_of(cause)
        texts.append(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …")
        cause = cause.__cause__
    return ", from ".join(texts)
