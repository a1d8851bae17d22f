"""Main program of a rank: runs one pickled function and writes its outcome to a file.

The function arrives through standard input, because it may contain secrets, which must not be
written to a disk. `RankProcess` starts the program as
``python -m hvd_estimators.launch.rank.worker DIRECTORY DESCRIPTOR``, by `python_module`. With
``--warm`` the process forks ranks (`hvd_estimators.launch.warm.server`). Imports neither PySpark
nor a framework.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from hvd_estimators._util.lazy_imports import after_import
from hvd_estimators._util.system import die_with_parent
from hvd_estimators.launch.rank.guardian import RANK_ARGUMENT, empty_stdin, split_off_guardian
from hvd_estimators.launch.rank.outcome import ErrorReport, UnusableHorovodError, report_error
from hvd_estimators.launch.rank.preemption import PreemptionCheck, sending_sigterm

OUTCOME_FILE = "outcome.pkl"
CALLED_FILE = "called"
"""Name of the empty file in the rank's directory that exists once the function was called."""

HOROVOD_PROBLEM_VARIABLE = "HVD_ESTIMATORS_HOROVOD_PROBLEM"
"""Environment variable of ranks: the reason why they cannot use Horovod, if there is one."""

_RESERVED_BYTES = 2**18
"""Space that a rank reserves at its start, so that it can report an error if the disk is full."""


def main(directory: str) -> int:
    """Run the call from standard input, and write its outcome to a directory.

    The outcome is a pickled tuple: ``("result", bytes)`` with the cloudpickled return value, or
    ``("error", ErrorReport)``. The driver shows the error; this process does not print it.

    Returns
    -------
    int
        The exit status: 0, or 1 if the function raised.
    """
    outcome: tuple[str, bytes | ErrorReport]
    partial = Path(directory) / f"{OUTCOME_FILE}.partial"
    try:
        partial.write_bytes(bytes(_RESERVED_BYTES))
        with open(0, "rb", closefd=False) as file:
            call = file.read()
        empty_stdin()
        *_, sys.argv, fn, args, kwargs = cloudpickle.loads(call)
        del call
        Path(directory, CALLED_FILE).touch()
        with after_import("horovod.common.basics", _reject_unusable_horovod):
            outcome = ("result", cloudpickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:
        outcome = ("error", report_error(error))
    try:
        _overwrite(partial, pickle.dumps(outcome))
    except OSError as error:
        outcome = ("error", report_error(_named(error, directory)))
        _overwrite(partial, pickle.dumps(outcome))
    os.replace(partial, Path(directory) / OUTCOME_FILE)
    return 0 if outcome[0] == "result" else 1


def _reject_unusable_horovod(basics: Any) -> None:
    """Let ``hvd.init()`` of any framework raise the reason why this rank cannot use Horovod."""
    problem = os.environ.get(HOROVOD_PROBLEM_VARIABLE, "")

    def init(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnusableHorovodError(problem)

    if problem:
        basics.HorovodBasics.init = init


def _overwrite(file: Path, content: bytes) -> None:
    """Replace a file's content, in the space that the file has already."""
    with open(file, "r+b" if file.exists() else "wb") as opened:
        opened.write(content)
        opened.truncate()


def _named(error: OSError, directory: str) -> Exception:
    """Return the error to report instead of one of writing the outcome."""
    from hvd_estimators.store.storage_errors import naming_full_disk

    try:
        with naming_full_disk():
            raise OSError(error.errno, error.strerror, f"{directory}/{OUTCOME_FILE}") from error
    except Exception as named:
        return named


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
    elif arguments[0] == RANK_ARGUMENT:
        directory = arguments[1]
        die_with_parent(int(arguments[2]))
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
    manager: NoNotifications,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
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
