"""Run Python programs with a time limit, in processes of which none is left behind.

What the doctor imports may crash, hang or hold a GPU's memory, so it happens in such a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO

from hvd_estimators.exceptions import HvdEstimatorsError

__all__ = ["ProbeError", "run_python", "two_rank_allreduce"]

_SUMS = ["3.0", "3.0"]  # ranks 0 and 1 give 1 and 2


class ProbeError(HvdEstimatorsError):
    """Something that was tried did not work; the message ends with what it said last."""


def run_python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    seconds: float,
    what: str = "process",
) -> str:
    """Run a Python program and return the last line of what it prints.

    Parameters
    ----------
    *arguments : str
        Of the interpreter: ``"-c", code`` or ``"-m", module`` and the program's own.
    environment : mapping, optional
        Variables to lay over this process's own.
    seconds : float
        Time limit.
    what : str
        What the program is called in an error.

    Raises
    ------
    ProbeError
        The program failed or did not end in time; the message has the last line that it said.
    """
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        with _process(arguments, environment or {}, output, errors) as process:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise ProbeError(f"{what} did not end in {seconds:g} s") from None
        if status:
            raise ProbeError(f"{what} failed: {_last_line(errors) or f'exit status {status}'}")
        return _last_line(output)


def two_rank_allreduce(framework: str, *, seconds: float) -> float:
    """Let two ranks of a `LocalBackend` reduce a tensor, and return the seconds it took.

    Parameters
    ----------
    framework : {'torch', 'tensorflow'}
        Whose tensors are reduced.
    seconds : float
        Time limit.

    Raises
    ------
    ProbeError
        The ranks failed, got a wrong sum or did not end in time.
    """
    started = time.monotonic()
    module = "hvd_estimators.commands.doctor_trial"
    answer = run_python("-m", module, framework, seconds=seconds, what="an allreduce")
    if answer.split() != _SUMS:
        raise ProbeError(f"two ranks that gave 1 and 2 got the sums {answer}")
    return time.monotonic() - started


@contextlib.contextmanager
def _process(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO[str], errors: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python in a process group of its own, which is gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return next((line.strip() for line in reversed(file.readlines()) if line.strip()), "")
