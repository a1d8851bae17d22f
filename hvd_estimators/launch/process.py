"""A rank's process, seen from its parent: started, watched, and never left behind."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
from typing_extensions import Self

from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.worker import CALL_FILE, OUTCOME_FILE

__all__ = ["RankOutcome", "RankProcess", "pickle_call", "results_in_order"]

_TAIL_LINES = 60
_EXIT_SECONDS = 10.0


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended; crosses from the worker to the driver.

    Attributes
    ----------
    rank : int
        The rank.
    host : str
        The machine that it ran on.
    result : bytes or None
        The pickled return value; None if the rank failed.
    error_type : str
        Name of the exception, ``"exit"`` where the process ended without one, ``"aborted"`` where
        it was ended because another rank had failed; empty for a result.
    error : str
        The traceback, or what is known instead.
    output_tail : str
        The end of what the process printed.
    ended_at : float
        Seconds since the epoch.
    """

    rank: int
    host: str
    result: bytes | None
    error_type: str = ""
    error: str = ""
    output_tail: str = ""
    ended_at: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the rank has no result."""
        return self.result is None


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call for a rank; functions and classes of ``__main__`` go by value."""
    return cloudpickle.dumps((fn, tuple(args), dict(kwargs)))


def results_in_order(outcomes: Sequence[RankOutcome]) -> list[Any]:
    """Return the ranks' results in the order of the ranks.

    Raises
    ------
    WorkerFailedError
        If a rank failed, with what the rank that failed first has to say.
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        ordered = sorted(outcomes, key=lambda outcome: outcome.rank)
        return [pickle.loads(outcome.result) for outcome in ordered if outcome.result is not None]
    first = min(failed, key=_blame)
    others = [str(o.rank) for o in failed if o is not first and o.error_type != "aborted"]
    also = f" (ranks {', '.join(others)} failed after it)" if others else ""
    # A rank prints its traceback too, as the last thing it does.
    output = first.output_tail.removesuffix(first.error).rstrip()
    raise WorkerFailedError(
        f"Rank {first.rank} on {first.host} failed{also}:\n{first.error.rstrip()}\n"
        f"The end of its output:\n{output or '(none)'}",
        rank=first.rank,
        host=first.host,
        output_tail=first.output_tail,
    )


def _blame(outcome: RankOutcome) -> tuple[int, float]:
    """Order failures by how likely they are the cause: a peer's end only breaks collectives."""
    consequence = {"aborted": 2, "HorovodInternalError": 1}.get(outcome.error_type, 0)
    return consequence, outcome.ended_at


class RankProcess:
    """A fresh Python process that runs one call as one rank. Used as a context manager.

    It runs in a process group of its own, which is killed when the block ends, and by itself when
    the parent dies.

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
    on_line : callable, optional
        Called with each line that it prints.
    executable : str, optional
        The Python to run. Default: this one.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        call: bytes,
        env: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        executable: str | None = None,
    ) -> None:
        self.rank = rank
        self.host = host
        self._call = call
        self._env = dict(env)
        self._on_line = on_line
        self._executable = executable or sys.executable
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)

    def __enter__(self) -> Self:
        self._directory = tempfile.mkdtemp(prefix="hvd-estimators-rank-")
        (Path(self._directory) / CALL_FILE).write_bytes(self._call)
        self._process = subprocess.Popen(
            [self._executable, "-u", "-m", "hvd_estimators.launch.worker", self._directory],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.poll() is None

    def abort(self) -> RankOutcome:
        """Kill the process, because another rank failed."""
        if not self.running():
            return self.outcome()
        self._kill()
        return self._failure("aborted", "Ended because another rank had failed.")

    def outcome(self) -> RankOutcome:
        """Return how the process ended, or is about to; waits for it."""
        status = self._process.wait()
        ended_at = time.time()
        # What the rank started may hold its output open.
        self._kill()
        path = Path(self._directory) / OUTCOME_FILE
        if not path.exists():
            return self._failure("exit", f"The process {_describe_exit(status)}.", ended_at)
        kind, *values = pickle.loads(path.read_bytes())
        if kind == "error":
            return self._failure(values[0], values[1], path.stat().st_mtime)
        return RankOutcome(self.rank, self.host, values[0], ended_at=ended_at)

    def _failure(self, error_type: str, error: str, ended_at: float | None = None) -> RankOutcome:
        tail = "".join(self._tail)
        return RankOutcome(
            self.rank, self.host, None, error_type, error, tail, ended_at or time.time()
        )

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line)
            if self._on_line is not None:
                self._on_line(line)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=_EXIT_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not (self._reader.is_alive() and stream.readable()):
                stream.close()


def _describe_exit(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; the machine may have run out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"exited with status {status} without a result"
