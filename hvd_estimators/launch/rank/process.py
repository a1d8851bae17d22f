"""A rank's process as its parent handles it: start, supervision and guaranteed end."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import cloudpickle

from hvd_estimators._util.import_path import python_module
from hvd_estimators._util.system import memory_file, signal_of
from hvd_estimators._util.unpickle_imports import first_imports
from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE, cancel_grace, grace_asked
from hvd_estimators.launch.rank.guardian import PID_FILE
from hvd_estimators.launch.rank.hang_detection import (
    StallWatch,
    is_stopped,
    read_progress,
    stall_environment,
)
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.output import LineHandler, OutputReader
from hvd_estimators.launch.rank.worker import CALLED_FILE
from hvd_estimators.launch.warm.client import ForkedRank, WarmStart

_EXIT_SECONDS = 3.0
_LOOK_SECONDS = 0.5


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call for a rank, with functions and classes of ``__main__`` by value.

    The call includes the driver's command line, so that a ``main()`` that parses arguments finds
    them on ranks.

    Raises
    ------
    ParamError
        If the call cannot be pickled.
    """
    try:
        return cloudpickle.dumps((*first_imports(), _argv(), fn, tuple(args), dict(kwargs)))
    except Exception as error:
        # The error names the user's function, not this package's wrapper around it.
        is_ours = str(getattr(fn, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
        named = args[0] if is_ours and args and callable(args[0]) else fn
        name = getattr(named, "__qualname__", repr(named))
        raise ParamError(
            f"{name} and its arguments are sent to the ranks with cloudpickle, which fails: "
            f"{type(error).__name__}: {error}. Create objects that cannot be sent "
            "within the function."
        ) from error


def _argv() -> list[str]:
    """Return a script's ``sys.argv``; in a notebook or shell, only the program name."""
    is_script = hasattr(sys.modules.get("__main__"), "__file__")
    return sys.argv[: None if is_script else 1]


class RankProcess:
    """A separate Python process that runs one call as one rank; used as a context manager.

    The process runs in its own session, and its standard input is empty. When the block or this
    process ends, the guardian (`hvd_estimators.launch.rank.guardian`) ends the rank and all of its
    descendants.

    Parameters
    ----------
    rank : int
        The rank, for the outcome.
    host : str
        The machine's name, for the outcome.
    call : bytes
        The pickled call, from `pickle_call`.
    env : mapping
        The complete environment of the process.
    on_lines : callable
        Called from another thread with a stream's name and batches of its lines.
    executable : str, optional
        The Python executable. Default: the executable of this process.
    separate_streams : bool
        Whether standard output and standard error have a pipe each. The order between the lines of
        both is then unknown.
    warm : WarmStart, optional
        Fork the process from this warm process, if possible. Default: start a fresh process.
    on_called : callable
        Called by `poll` once the process has called its function, or by `outcome` once it has
        ended.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        call: bytes,
        env: Mapping[str, str],
        on_lines: LineHandler = lambda stream, lines: None,
        executable: str | None = None,
        separate_streams: bool = False,
        warm: WarmStart | None = None,
        on_called: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.host = host
        self._call = call
        self._env = {**env, **stall_environment(env)}
        self._stalls = StallWatch(env, 4 * _LOOK_SECONDS)
        self._next_look = 0.0
        self._on_lines = on_lines
        self._streams = ("stdout", "stderr") if separate_streams else ("",)
        self._executable = executable or sys.executable
        self._warm = warm
        self._is_called = False
        self._on_called = on_called

    def __enter__(self) -> Self:
        # The rank reads the call from it, and writes its outcome to it.
        self._file = memory_file()
        self._process: subprocess.Popen[bytes] | ForkedRank | None = None
        self._has_ended = False
        self._directory = ""
        self._patience = 0.0
        reading, writing = os.pipe()
        # No process writes to this pipe. It closes when this process ends for any reason.
        self._lifeline = os.fdopen(writing, "wb", buffering=0)
        try:
            self._directory = tempfile.mkdtemp(prefix="hvd-estimators-rank-")
            self._env = {**self._env, DIRECTORY_VARIABLE: self._directory}
            self._file.write(self._call)
            self._file.seek(0)
            self._start(reading)
        except BaseException:
            self._end()
            raise
        finally:
            os.close(reading)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def running(self) -> bool:
        """Return whether the process is still running."""
        return self._process is not None and self._process.poll() is None

    def poll(self) -> str | None:
        """Return an error message if the process has stalled. Call it often."""
        now = time.monotonic()
        if self._process is None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        if Path(self._directory, CALLED_FILE).exists():
            self._report_call()
        pids = [self._process.pid]
        with contextlib.suppress(OSError, ValueError):  # the file may not have been written yet
            pids.append(int(Path(self._directory, PID_FILE).read_text()))
        mark = read_progress(self._directory)
        return self._stalls.update(any(map(is_stopped, pids)), mark, now)

    def abort(
        self, error_type: str = "aborted", error: str = "Ended because another rank had failed."
    ) -> RankOutcome:
        """Kill the process, because another rank failed or for the given reason."""
        if not self.running():
            return self.outcome()
        # With grace the rank would only wait for the failed rank.
        cancel_grace(self._directory)
        self._kill()
        return self._failure(error_type, error)

    def terminate(self) -> None:
        """Request the end of the process, within its grace period, without waiting for it."""
        if not self._lifeline.closed:
            self._patience = grace_asked(self._directory)
            self._lifeline.close()

    def outcome(self) -> RankOutcome:
        """Wait until the process ends, and return its outcome."""
        assert self._process is not None
        status = self._process.wait()
        ended_at = time.time()
        self._report_call()
        self._kill()
        self._file.seek(len(self._call))
        try:
            raised_at, kind, value = pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):  # it has not written all of it, or nothing
            how = "killed" if signal_of(status) else "exit"
            return self._failure(how, f"The process {_describe_exit(status)}.", ended_at)
        if kind == "error":
            failure = self._failure(value.error_type, value.traceback, raised_at)
            return replace(failure, report=value)
        return RankOutcome(self.rank, self.host, value, ended_at=ended_at)

    def _report_call(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._on_called()

    def _start(self, lifeline: int) -> None:
        pipes = [os.pipe() for _ in self._streams]
        self._pipes = [os.fdopen(reading, "rb", buffering=0) for reading, _ in pipes]
        output, errors = pipes[0][1], pipes[-1][1]
        try:
            if self._warm is not None:
                files = [self._file.fileno(), lifeline, output, errors]
                self._process = self._warm.fork(self._executable, self._env, self._directory, files)
            if self._process is None:
                self._start_fresh(lifeline, output, errors)
        finally:
            for _, writing in pipes:
                os.close(writing)
            if self._process is None:
                self._close_pipes()
        names = {reading: name for (reading, _), name in zip(pipes, self._streams, strict=True)}
        self._output = OutputReader(names, self._on_lines)

    def _start_fresh(self, lifeline: int, output: int, errors: int) -> None:
        command = python_module("hvd_estimators.launch.rank.worker", self._executable)
        try:
            self._process = subprocess.Popen(
                [*command, self._directory, str(lifeline)],
                env=self._env,
                # The worker reads its standard input and then replaces it by the null device.
                stdin=self._file,
                stdout=output,
                stderr=errors,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        except OSError as error:
            raise DependencyError(
                f"{self.host} cannot start the Python {self._executable!r}: {error.strerror}. Set "
                "executable to a Python that is there on all machines, with this package installed."
            ) from error

    def _failure(self, error_type: str, error: str, ended_at: float | None = None) -> RankOutcome:
        tail, ended_at = self._output.tail(), ended_at or time.time()
        return RankOutcome(self.rank, self.host, None, error_type, error, tail, ended_at)

    def _kill(self) -> None:
        """End the rank, if it runs, and all of its descendants."""
        self.terminate()
        if self._process is None:
            return
        if not self._has_ended:
            self._kill_group(self._process)
            self._has_ended = True
        if self._output.finish():
            self._close_pipes()

    def _kill_group(self, process: subprocess.Popen[bytes] | ForkedRank) -> None:
        """End the process and its group, once: later, the ID may belong to another group."""
        # A stopped guardian must continue before it can act.
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        try:
            # The guardian ends the rank.
            process.wait(self._patience + _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # This also runs if the user interrupts a second time. The ID of a fork that has ended
            # may already belong to another process.
            if isinstance(process, subprocess.Popen) or process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.close()

    def _end(self) -> None:
        self._kill()
        self._file.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _describe_exit(status: int) -> str:
    name = signal_of(status)
    hint = "; the machine may have run out of memory" if name == "SIGKILL" else ""
    if status < 0:
        return f"was killed by {name or -status}{hint}"
    reason = f" ({name}{hint})" if name else ""
    return f"exited with status {status}{reason} without a result"
