"""Dry runs of user code on the driver, without side effects and only to check shapes."""

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

# Exceptions that mismatched columns can cause, and undefined names, which also fail on every rank.
# Other exceptions say nothing about shapes.
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

# Packages that query the process's rank, GPU or environment.
_PACKAGES = ("horovod", "mpi4py", "os", "torch.cuda", "torch.distributed", "torch.xpu")
_WORDS = re.compile(
    r"\b(cuda|cudnn|nvidia|gpus?|horovod|process group|allocate memory)\b", re.IGNORECASE
)

# Streams, warning filters and random states belong to the whole process.
_lock = threading.RLock()


@contextlib.contextmanager
def traceless() -> Iterator[None]:
    """Run user code in the block and restore the state of the process afterwards.

    Discards this thread's output to the standard streams, hides warnings, and restores the random
    states of Python and NumPy. The caller must pass copies of the user's objects to the code. Only
    one thread at a time can be in the block.
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
    """Return whether an exception of a dry run says nothing about shapes; if so, log it.

    Such an exception can occur because the driver is not a Horovod rank, has no GPU, or has other
    files, packages or environment variables. Exceptions of types that mismatched shapes do not
    cause also count.

    Parameters
    ----------
    error : BaseException
        The exception from the user's code.
    shape_kinds : tuple of type
        Exception types that a framework raises for mismatched shapes, in addition to the built-in
        ones.
    """
    judged = isinstance(error, (*_SHAPE_KINDS, *shape_kinds)) and not isinstance(
        error, _OTHER_KINDS
    )
    if judged and not any(_WORDS.search(str(e)) or _comes_from_process(e) for e in causes(error)):
        return False
    log_untried(error)
    return True


def log_untried(error: BaseException) -> None:
    """Warn that an exception prevented the dry run on the driver."""
    logger.warning(
        "The model could not be tried on the driver (%s: %s). The ranks will show whether it fits "
        "the data. dry_run=False leaves this trial out.",
        type(error).__name__,
        error,
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that led to it, the newest first.

    Omits exceptions that a caller of this code was already handling, because a fit may run in the
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
    """Return the ids of the frames that called the frame that caught an exception."""
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
    """Return whether an exception passed through code that queries the process."""
    traceback = error.__traceback__
    while traceback is not None:
        module = f"{traceback.tb_frame.f_globals.get('__name__')}."
        if module.startswith(tuple(f"{package}." for package in _PACKAGES)):
            return True
        traceback = traceback.tb_next
    return False


class _Muted:
    """Stream that discards the output of one thread and forwards that of other threads."""

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
