"""Main program of a rank: runs one pickled function and returns its outcome.

Standard input is a file in memory with the function, which may contain secrets that must not be
written to a disk. The outcome is written to the same file, so a full disk does not lose it.
`RankProcess` starts the program as
``python -m hvd_estimators.launch.rank.worker DIRECTORY DESCRIPTOR``, by `python_module`. With
``--warm`` the process forks ranks (`hvd_estimators.launch.warm.server`). Imports neither PySpark
nor a framework.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from hvd_estimators._util.lazy_imports import after_import
from hvd_estimators.launch.rank.guardian import empty_stdin, split_off_guardian
from hvd_estimators.launch.rank.outcome import ErrorReport, UnusableHorovodError, report_error
from hvd_estimators.launch.rank.preemption import PreemptionCheck, sending_sigterm

CALLED_FILE = "called"
"""Name of the empty file in the rank's directory that exists once the function was called."""


def main(directory: str) -> int:
    """Run the call from standard input, and write its outcome there.

    The outcome is a pickled tuple: the time of the end in seconds since the epoch, and ``"result"``
    with the cloudpickled return value, or ``"error"`` with an `ErrorReport`. It follows the bytes
    of the call, which are freed. The driver shows the error; this process does not print it.

    Parameters
    ----------
    directory : str
        The rank's directory.

    Returns
    -------
    int
        The exit status: 0, or 1 if the function raised.
    """
    outcome: tuple[str, bytes | ErrorReport]
    with open(os.dup(0), "r+b") as file:
        call = file.read()
        file.truncate(0)  # the position stays behind the call
        empty_stdin()
        try:
            *_, sys.argv, fn, args, kwargs = cloudpickle.loads(call)
            del call
            with contextlib.suppress(OSError):  # the disk is full
                Path(directory, CALLED_FILE).touch()
            with after_import("horovod.common.basics", _reject_unusable_horovod):
                outcome = ("result", cloudpickle.dumps(_call(fn, args, kwargs)))
        except BaseException as error:
            outcome = ("error", report_error(error))
        pickle.dump((time.time(), *outcome), file)
    return 0 if outcome[0] == "result" else 1


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the user's function; a child that it forks, and that leaves it, ends here.

    Contexts between the fork and this function end in the child, too.
    """
    rank = os.getpid()
    try:
        return fn(*args, **kwargs)
    finally:
        if os.getpid() != rank:
            _end_fork(sys.exception())


def _end_fork(error: BaseException | None) -> NoReturn:
    """End a forked child as Python does, but without exit hooks, which belong to the rank."""
    status = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit):
            if isinstance(error.code, int | None):
                status = error.code or 0
            else:
                print(error.code, file=sys.stderr)
        elif error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


def _reject_unusable_horovod(basics: Any) -> None:
    """Let ``hvd.init()`` of any framework raise the reason why this rank cannot use Horovod."""
    from hvd_estimators.launch.horovod_build import patches_problem

    problem = patches_problem()

    def init(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnusableHorovodError(problem)

    if problem:
        basics.HorovodBasics.init = init


def _exit(status: int) -> NoReturn:
    """End the process without the interpreter's finalization, which takes a second with torch."""
    # These include Horovod's shutdown and the exit hooks of other packages.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _start(arguments: Sequence[str]) -> NoReturn:
    if arguments[0] == "--warm":
        from hvd_estimators.launch.warm.server import serve

        rank = serve(json.loads(arguments[1]))
        directory = rank.directory
        split_off_guardian(directory, rank.lifeline, rank.parent, rank.report)
    else:
        directory = arguments[0]
        split_off_guardian(directory, int(arguments[1]))
    _exit(main(directory))


class NoNotifications:
    """Replacement for the notification manager of ``horovod.elastic``.

    Horovod's manager would listen on all network interfaces for host updates, and register itself
    with the rendezvous. This package sends no such updates.
    """

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def register_listener(self, state: Any) -> None:
        """Do nothing."""

    def remove_listener(self, state: Any) -> None:
        """Do nothing."""


def call_with(
    manager: NoNotifications, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function with a replacement for Horovod's notification manager.

    Horovod is imported only if the function imports it.
    """

    def replace(module: Any) -> None:
        # Horovod's modules for all frameworks use the manager of this module.
        module.notification_manager = manager

    with after_import("horovod.common.elastic", replace):
        return fn(*args, **kwargs)


def call_without_notifications(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    preemption_check: PreemptionCheck | None = None,
) -> Any:
    """Call a function, which may be a program for ``horovod.elastic``.

    If ``preemption_check`` gives notice, the process gets SIGTERM.
    """
    with sending_sigterm(preemption_check):
        return call_with(NoNotifications(), fn, args, kwargs)


def of_first_rank(main: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function; return its result on rank 0 alone, since others' may not be serializable."""
    value = call_without_notifications(main, (), kwargs)
    return value if os.environ["HOROVOD_RANK"] == "0" else None


if __name__ == "__main__":
    _start(sys.argv[1:])
