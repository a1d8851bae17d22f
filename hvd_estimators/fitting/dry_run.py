"""Dry runs of a user's code on the driver: without a trace, and judging shapes only."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["causes", "leave_to_ranks", "log_untried", "traceless"]

logger = logging.getLogger(__name__)

# Of what columns that do not fit raise, and names that are not defined, which no rank has either.
# All else says nothing about shapes.
_SHAPE_KINDS = (
    TypeError,
    ValueError,
    RuntimeError,
    LookupError,
    AssertionError,
    NameError,
    Warning,
)
_OTHER_KINDS = (NotImplementedError, RecursionError, UnicodeError)

# Packages that ask a process for its rank, its GPU or its environment.
_PACKAGES = ("horovod", "mpi4py", "os", "torch.cuda", "torch.distributed", "torch.xpu")
_WORDS = re.compile(
    r"\b(cuda|cudnn|nvidia|gpus?|horovod|process group|allocate memory)\b", re.IGNORECASE
)

# What is set aside belongs to the whole process.
_lock = threading.RLock()


@contextlib.contextmanager
def traceless() -> Iterator[None]:
    """Run a user's code so that the process is afterwards what it was.

    What this thread writes to the standard streams is dropped, warnings are not shown, and the
    states of Python's and NumPy's random numbers are put back. Give the code copies of the user's
    objects. One thread at a time.
    """
    with _lock:
        python, numpy = random.getstate(), np.random.get_state()
        muted: Any = _Muted(sys.stdout), _Muted(sys.stderr)
        try:
            with (
                contextlib.redirect_stdout(muted[0]),
                contextlib.redirect_stderr(muted[1]),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def leave_to_ranks(error: BaseException, shape_kinds: tuple[type[BaseException], ...] = ()) -> bool:
    """Return whether an exception of a dry run says nothing about shapes, and log it then.

    That is one that comes from the process being none of Horovod's ranks, having no GPU, or having
    other files, packages or variables; and every exception of a kind that shapes do not raise.

    Parameters
    ----------
    error : BaseException
        What a user's code raised.
    shape_kinds : tuple of type
        Kinds that a framework raises where shapes do not fit, beside Python's own.
    """
    judged = isinstance(error, (*_SHAPE_KINDS, *shape_kinds)) and not isinstance(
        error, _OTHER_KINDS
    )
    if judged and not any(_WORDS.search(str(e)) or _comes_from_process(e) for e in causes(error)):
        return False
    log_untried(error)
    return True


def log_untried(error: BaseException) -> None:
    """Warn that the driver could not try the model because of an exception."""
    logger.warning(
        "The model could not be tried on the driver (%s: %s). The ranks will show whether it fits "
        "the data. dry_run=False leaves this trial out.",
        type(error).__name__,
        error,
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the newest first.

    An exception that a caller of this code was handling before is left out: a fit may run in the
    ``except`` block of a program.
    """
    callers = _callers(error)
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen and not _caught_in(callers, found):
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _callers(error: BaseException) -> set[int]:
    """Return the ids of the frames that called the one that caught an exception."""
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ else None
    callers = set()
    while frame is not None:
        callers.add(id(frame))
        frame = frame.f_back
    return callers


def _caught_in(frames: set[int], error: BaseException) -> bool:
    traceback = error.__traceback__
    return traceback is not None and id(traceback.tb_frame) in frames


def _comes_from_process(error: BaseException) -> bool:
    """Return whether an exception passed through code that asks about the process."""
    traceback = error.__traceback__
    while traceback is not None:
        module = f"{traceback.tb_frame.f_globals.get('__name__')}."
        if module.startswith(tuple(f"{package}." for package in _PACKAGES)):
            return True
        traceback = traceback.tb_next
    return False


class _Muted:
    """A stream that drops what one thread writes and hands on what others do."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        written: int = self._stream.write(text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
