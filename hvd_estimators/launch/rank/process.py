"""A rank's process, seen from its parent: started, watched, and never left behind."""

from __future__ import annotations

import contextlib
import errno
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
from types import TracebackType
from typing import IO, Any

import cloudpickle
from typing_extensions import Self

from hvd_estimators._util.unpickling import first_imports
from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch.rank.directory import make_rank_folder
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE, cancel_grace, grace_asked
from hvd_estimators.launch.rank.guardian import PID_FILE
from hvd_estimators.launch.rank.hang_detection import (
    HangWatch,
    StallWatch,
    hang_limit,
    is_stopped,
    sign_left,
    stack_left,
    stall_environment,
    stall_limit,
)
from hvd_estimators.launch.rank.outcome import NOT_STARTED, RankOutcome
from hvd_estimators.launch.rank.output import OutputReader, unnoticed
from hvd_estimators.launch.rank.worker import OUTCOME_FILE
from hvd_estimators.launch.warm.client import ForkedRank, WarmStart

__all__ = ["RankProcess", "pickle_call"]

_EXIT_SECONDS = 3.0
_LOOK_SECONDS = 0.5
# What says that a program is not there, or is none.
_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.ELOOP)


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call for a rank; functions and classes of ``__main__`` go by value.

    The driver's command line goes with it: a ``main()`` that parses arguments finds them on ranks.

    Raises
    ------
    ParamError
        If it cannot be pickled.
    """
    try:
        return cloudpickle.dumps((*first_imports(), _argv(), fn, tuple(args), dict(kwargs)))
    except Exception as error:
        # What we wrap around it is not what a user knows.
        is_ours = str(getattr(fn, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
        named = args[0] if is_ours and args and callable(args[0]) else fn
        name = getattr(named, "__qualname__", repr(named))
        raise ParamError(
            f"{name} and its arguments are sent to the ranks with cloudpickle, which fails: "
            f"{type(error).__name__}: {error}. Make what cannot be sent within the function."
        ) from error


def _argv() -> list[str]:
    """Return a script's ``sys.argv``; in a notebook or shell, the name alone."""
    is_script = hasattr(sys.modules.get("__main__"), "__file__")
    return sys.argv[: None if is_script else 1]


class RankProcess:
    """A Python process of its own that runs one call as one rank. Used as a context manager.

    It runs in a session of its own. When the block ends, or this process, the rank and all that it
    started are ended, by its guardian (`hvd_estimators.launch.rank.guardian`). Its standard input
    is empty.

    Parameters
    ----------
    rank : int
        The rank, for the outcome.
    host : str
        The machine's name, for the outcome.
    call : bytes
        What `pickle_call` returned.
    env : mapping
        Its whole environment.
    on_lines : callable, optional
        Called with the lines that it prints, some at a time, from another thread; a long line is
        cut in the middle.
    on_error_lines : callable, optional
        Called with the lines of its standard error, which then has a pipe of its own, so that their
        order among the others is not known. Default: they are among the others.
    executable : str, optional
        The Python to run. Default: this one.
    warm : WarmStart, optional
        What the process is forked from, if that is possible. Default: it is a fresh one.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        call: bytes,
        env: Mapping[str, str],
        on_lines: Callable[[list[str]], None] | None = None,
        executable: str | None = None,
        on_error_lines: Callable[[list[str]], None] | None = None,
        warm: WarmStart | None = None,
    ) -> None:
        self.rank = rank
        self.host = host
        self._call = call
        self._env = {**env, **stall_environment(env)}
        self._stalls = StallWatch(stall_limit(env), 4 * _LOOK_SECONDS)
        self._hangs = HangWatch(hang_limit(env), 4 * _LOOK_SECONDS)
        self._next_look = 0.0
        self._on_lines = on_lines
        self._on_error_lines = on_error_lines
        self._executable = executable or sys.executable
        self._warm = warm

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[bytes] | ForkedRank | None = None
        self._start_error = ""
        self._directory = make_rank_folder()
        self._env = {**self._env, DIRECTORY_VARIABLE: self._directory}
        self._patience = 0.0
        reading, writing = os.pipe()
        # Never written to: it closes when this process ends, however it does.
        self._lifeline = os.fdopen(writing, "wb", buffering=0)
        try:
            with _memory_file() as call:
                call.write(self._call)
                call.seek(0)
                self._start(reading, call)
        except BaseException:
            self._end()
            raise
        finally:
            os.close(reading)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process is not None and self._process.poll() is None

    def stalled(self) -> str | None:
        """Return why the process is to be ended though it runs, if so; call this often."""
        now = time.monotonic()
        if self._process is None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        pids = [self._process.pid]
        with contextlib.suppress(OSError, ValueError):  # it has just been started
            pids.append(int(Path(self._directory, PID_FILE).read_text()))
        stopped = self._stalls.look(self.rank, any(map(is_stopped, pids)), now)
        return stopped or self._hangs.look(sign_left(self._directory), now)

    @property
    def waits_in(self) -> str:
        """The calls in which the rank has waited without progress; empty if there are none."""
        return stack_left(self._directory)

    def abort(
        self, error_type: str = "aborted", error: str = "Ended because another rank had failed."
    ) -> RankOutcome:
        """Kill the process, because another rank failed, or for the reason given."""
        if not self.running():
            return self.outcome()
        # It would wait for the one that has failed.
        cancel_grace(self._directory)
        self._kill()
        return self._failure(error_type, error)

    def terminate(self) -> None:
        """Have the process ended, within the time that it asks for, and do not wait for that."""
        if not self._lifeline.closed:
            self._patience = grace_asked(self._directory)
            self._lifeline.close()

    def outcome(self) -> RankOutcome:
        """Return how the process ended, or is about to; waits for it."""
        if self._process is None:
            return self._failure(NOT_STARTED, self._start_error)
        status = self._process.wait()
        ended_at = time.time()
        self._kill()
        path = Path(self._directory) / OUTCOME_FILE
        if not path.exists():
            how = "killed" if _signal_of(status) else "exit"
            return self._failure(how, f"The process {_describe_exit(status)}.", ended_at)
        kind, value = pickle.loads(path.read_bytes())
        if kind == "error":
            failure = self._failure(value.error_type, value.full_traceback, path.stat().st_mtime)
            return replace(failure, report=value)
        return RankOutcome(self.rank, self.host, value, ended_at=ended_at)

    def _start(self, lifeline: int, call: IO[bytes]) -> None:
        takers = {"output": self._on_lines}
        if self._on_error_lines is not None:
            takers["errors"] = self._on_error_lines
        pipes = {name: os.pipe() for name in takers}
        self._pipes = [os.fdopen(reading, "rb", buffering=0) for reading, _ in pipes.values()]
        files = {name: writing for name, (_, writing) in pipes.items()}
        try:
            if self._warm is not None:
                given = {"call": call.fileno(), "lifeline": lifeline, **files}
                self._process = self._warm.fork(self._executable, self._env, self._directory, given)
            if self._process is None:
                self._start_fresh(lifeline, call, files["output"], files.get("errors"))
        finally:
            for writing in files.values():
                os.close(writing)
            if self._process is None:
                self._close_pipes()
        if self._process is not None:
            self._output = OutputReader(
                {pipes[name][0]: on_lines for name, on_lines in takers.items()},
                unnoticed(self._env),
            )

    def _start_fresh(self, lifeline: int, call: IO[bytes], output: int, errors: int | None) -> None:
        command = ["-u", "-m", "hvd_estimators.launch.rank.worker", self._directory, str(lifeline)]
        try:
            self._process = subprocess.Popen(
                [self._executable, *command],
                env=self._env,
                # The worker reads it, and then lets it be empty.
                stdin=call,
                stdout=output,
                stderr=output if errors is None else errors,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        except OSError as error:
            if error.errno not in _NO_PROGRAM:
                raise
            self._start_error = (
                f"cannot start the Python {self._executable!r}: {error.strerror}. Set executable "
                "to a Python that is there on all machines, with this package installed."
            )

    def _failure(self, error_type: str, error: str, ended_at: float | None = None) -> RankOutcome:
        tail = self._output.tail() if self._process is not None else ""
        return RankOutcome(
            self.rank, self.host, None, error_type, error, tail, ended_at or time.time()
        )

    def _kill(self) -> None:
        """End the rank, if it runs, and all that it started."""
        self.terminate()
        if self._process is None:
            return
        # So that it acts although it has been stopped.
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        try:
            # The guardian does it.
            self._process.wait(self._patience + _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also where the user interrupts for the second time. The id of a fork that has ended
            # may be another process's.
            if isinstance(self._process, subprocess.Popen) or self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._output.finish():
            self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.close()

    def _end(self) -> None:
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def _memory_file() -> IO[bytes]:
    """Open a file that is in memory; where there is no such thing, one that has no name."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("hvd-estimators-call"), "w+b")
    return tempfile.TemporaryFile()


def _signal_of(status: int) -> str:
    """Return the signal that ended a process; a shell that ran it adds 128. Empty without one."""
    with contextlib.suppress(ValueError):
        if status < 0 or status > 128:
            return signal.Signals(-status if status < 0 else status - 128).name
    return ""


def _describe_exit(status: int) -> str:
    name = _signal_of(status)
    hint = "; the machine may have run out of memory" if name == "SIGKILL" else ""
    if status < 0:
        return f"was killed by {name or -status}{hint}"
    told = f" ({name}{hint})" if name else ""
    return f"exited with status {status}{told} without a result"
