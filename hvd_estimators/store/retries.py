"""Trying again what storage fails at for a while: a network that breaks off, a server that is busy.

Clients of storage have retries of their own, of a few seconds. These are for what takes longer: a
server that starts again, throttling. Runs on both sides.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn, TypeVar

from hvd_estimators.exceptions import HvdEstimatorsError, StoreError, StoreUnavailableError
from hvd_estimators.store.storage_errors import REMEDIES, Kind, kind_of, redacted

__all__ = ["RETRY_SECONDS", "is_transient", "typed_errors", "with_retries"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 60.0
"""How long something that fails is tried again, from its first failure on."""

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
_WARN_AFTER = 1.0
_TOLD = 400
"""Characters of an error that are told; a data node tells all that it is."""


def is_transient(error: BaseException) -> bool:
    """Return whether it may help to try again what has raised an error.

    So it is with connections that are refused, reset or time out, with a server's own errors, and
    with throttling. It does not help where a file is missing, credentials or permission are, or
    space is.
    """
    return kind_of(error) is Kind.TRANSIENT


def with_retries(action: Callable[[], T], what: str, secrets: Collection[str] = ()) -> T:
    """Call a function, again and again while its errors are transient.

    The waits between the calls grow, and are partly random, so that many ranks do not come back at
    the same time. Whoever waits for more than a second is told so by a warning.

    Parameters
    ----------
    action : callable
        Is called once more when it failed, so that it has to begin from its beginning.
    what : str
        What it does, with the path, for messages: ``"reading 's3://bucket/key'"``.
    secrets : collection of str
        Texts that no message may hold.

    Raises
    ------
    StoreUnavailableError
        If it went on failing for `RETRY_SECONDS`.
    StoreError
        If credentials, permission or space are missing;
        or instead of any other error whose text holds a secret. A file that is missing stays a
        FileNotFoundError, and what else is wrong the error that it is.
    """
    wait, failed_at, warned = _FIRST_WAIT, None, False
    while True:
        try:
            return action()
        except HvdEstimatorsError:
            raise
        except Exception as error:
            kind = kind_of(error)
            if kind is not Kind.TRANSIENT:
                _raise_typed(error, kind, what, secrets)
            now = time.monotonic()
            failed_at = now if failed_at is None else failed_at
            if now - failed_at >= RETRY_SECONDS:
                _raise_typed(error, kind, what, secrets, tried_for=now - failed_at)
            if not warned and now - failed_at >= _WARN_AFTER:
                warned = True
                logger.warning(
                    "%s fails (%s). It is tried again for up to %g seconds.",
                    what[:1].upper() + what[1:],
                    redacted(_told(error), secrets),
                    RETRY_SECONDS,
                )
        time.sleep(min(wait * random.uniform(0.5, 1), RETRY_SECONDS))
        wait = min(wait * 2, _LONGEST_WAIT)


@contextlib.contextmanager
def typed_errors(what: str, secrets: Collection[str] = ()) -> Iterator[None]:
    """Make typed errors of what a block lacks to write a file: permission and space.

    For a block that cannot be called again, as somebody else's code writes in it.

    Raises
    ------
    StoreError
        If permission or space is missing.
    """
    try:
        yield
    except HvdEstimatorsError:
        raise
    except OSError as error:
        kind = kind_of(error)
        if kind not in (Kind.PERMISSION, Kind.SPACE):
            raise
        _raise_typed(error, kind, what, secrets)


def _raise_typed(
    error: Exception,
    kind: Kind,
    what: str,
    secrets: Collection[str],
    tried_for: float | None = None,
) -> NoReturn:
    told = _told(error)
    shown = redacted(told, secrets)
    if kind is Kind.MISSING or kind is Kind.OTHER:
        if shown == told:
            raise error
        if kind is Kind.MISSING:
            raise FileNotFoundError(shown) from None
        raise StoreError(f"The store failed at {what}: {shown}.") from None
    tries = "" if tried_for is None else f", tried again for {tried_for:.0f} seconds"
    error_class = StoreUnavailableError if kind is Kind.TRANSIENT else StoreError
    typed = error_class(
        f"The store failed at {what}: {kind.value} ({shown}{tries}). {REMEDIES[kind]}"
    )
    # A traceback shows the text of a cause as well.
    raise typed from (error if shown == told else None)


def _told(error: BaseException) -> str:
    """Return an error's class and text, with those of what it was raised from."""
    texts: list[str] = []
    found: BaseException | None = error
    while found is not None and len(texts) < 3:
        # Without the name node's traceback.
        told = re.split(r"(?:\n|\\n)(?:\t|\\t)at ", str(found), maxsplit=1)[0]
        told = told if len(told) <= _TOLD else f"{told[:_TOLD]} …"
        texts.append(f"{type(found).__name__}: {told}".rstrip(": "))
        found = found.__cause__
    return ", from ".join(texts)
