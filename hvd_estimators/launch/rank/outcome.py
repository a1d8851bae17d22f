"""Outcomes of ranks: their results, or the error that explains the job's failure."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_estimators._util.install_hints import BUILD_HOROVOD
from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.exceptions import (
    DependencyError,
    GpuError,
    StoreError,
    UnreachableError,
    WorkerFailedError,
    WorkerStoreError,
)
from hvd_estimators.launch.rank.output import shortened

# Error types that are not exceptions, and their values of `WorkerFailedError.cause`.
_CAUSES = {"exit": "exited", "killed": "killed", "aborted": "killed", "stalled": "stalled"}


_OWN = str(Path(__file__).parents[2])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class UnusableHorovodError(DependencyError):
    """Call of ``hvd.init()`` on a rank whose Horovod cannot be used. The driver raises its base."""


@dataclass(frozen=True)
class ErrorReport:
    """An exception as text, sent from a rank to the driver.

    Attributes
    ----------
    error_type : str
        The name of the exception's class.
    headline : str
        One line: class, message, and file and line of the innermost frame in the user's code.
    traceback : str
        The traceback, of bounded length.
    is_storage : bool
        Whether the exception is a `StoreError`.
    is_transient : bool
        Whether relaunched ranks need not raise it again, see `is_transient`.
    """

    error_type: str
    headline: str
    traceback: str
    is_storage: bool = False
    is_transient: bool = False


def is_transient(error: BaseException) -> bool:
    """Return whether an exception has a cause outside this rank, such as the end of another rank.

    Horovod's own error has no flag, and this process need not have Horovod.
    """
    is_of_horovod = type(error).__name__ == "HorovodInternalError"
    return is_of_horovod or bool(getattr(error, "is_transient", False))


def report_error(error: BaseException) -> ErrorReport:
    """Convert a caught exception to a report."""
    message = (str(error).splitlines() or [""])[0]
    name = type(error).__name__
    headline = shortened(f"{name}: {message}" if message else name, 1000)
    frame = _users_frame(traceback.extract_tb(error.__traceback__))
    where = f" ({frame.filename}:{frame.lineno}, in {frame.name})" if frame else ""
    # The message may contain a whole batch or model.
    text = shortened("".join(traceback.format_exception(error)))
    is_storage = isinstance(error, StoreError)
    return ErrorReport(name, f"{headline}{where}", text, is_storage, is_transient(error))


def _users_frame(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the innermost frame that belongs neither to this package nor to a library."""
    for frame in reversed(stack):
        is_library = frame.filename.startswith((f"{_OWN}/", *(f"{path}/" for path in _LIBRARIES)))
        if not is_library and not frame.filename.startswith("<frozen "):
            return frame
    return None


@dataclass(frozen=True)
class RankOutcome:
    """Result or failure of a rank, sent from the worker to the driver.

    Attributes
    ----------
    rank : int
        The rank.
    host : str
        The machine that the rank ran on.
    result : bytes or None
        The pickled return value; None if the rank failed.
    error_type : str
        The name of the exception's class; empty if the rank has a result. Other values:

        - ``"exit"``: the process ended without an exception.
        - ``"killed"``: a signal ended the process.
        - ``"stalled"``: the process was ended because it was stopped or made no progress for too
          long.
        - ``"aborted"``: the rank was ended or not started because another rank failed.
        - ``"lost"``: another rank could not be reached.
    error : str
        The traceback, or a description of the failure if there is no traceback.
    output_tail : str
        The last lines of the process's output, of bounded length.
    ended_at : float
        Time of the end, in seconds since the epoch. After a rank has run on Spark, by the clock of
        rank 0's host.
    lost : (int, str), optional
        Rank and host of the unreachable rank, if the error type is ``"lost"``.
    report : ErrorReport, optional
        The exception that the function raised, if any.
    """

    rank: int
    host: str
    result: bytes | None
    error_type: str = ""
    error: str = ""
    output_tail: str = ""
    ended_at: float = 0.0
    lost: tuple[int, str] | None = None
    report: ErrorReport | None = None

    @property
    def failed(self) -> bool:
        """Return whether the rank has no result."""
        return self.result is None

    @property
    def headline(self) -> str:
        """The exception as one line, or the description of another failure."""
        return self.error.rstrip() if self.report is None else self.report.headline


def results_in_order(outcomes: Sequence[RankOutcome]) -> list[Any]:
    """Return the ranks' results in the order of the ranks.

    Raises
    ------
    WorkerFailedError
        If a rank failed. It describes the failure of the rank that most likely failed first. It is
        a `WorkerStoreError` if that rank raised a `StoreError`.
    DependencyError
        If a machine lacks a dependency of the rank.
    UnreachableError
        If the ranks' hosts cannot reach each other.
    GpuError
        If two tasks were assigned the same GPU.
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        ordered = sorted(outcomes, key=lambda outcome: outcome.rank)
        return [loads(outcome.result) for outcome in ordered if outcome.result is not None]
    first = min(failed, key=_blame)
    if first.report is not None and first.error_type == UnusableHorovodError.__name__:
        problem = first.report.headline.removeprefix(f"{first.error_type}: ")
        raise DependencyError(f"Rank {first.rank} on {first.host}: {problem}")
    for kind in (DependencyError, GpuError, UnreachableError):
        # The user's function may raise the others.
        is_reported = first.report is None or kind is UnreachableError
        if first.error_type == kind.__name__ and is_reported:
            raise kind(first.error)
    if first.lost is not None:
        rank, host = first.lost
        raise WorkerFailedError(
            f"Rank {first.rank} on {first.host} has lost its connection to another rank. "
            f"{first.error.rstrip()}\nThe end of its output:\n{first.output_tail or '(none)'}",
            rank=rank,
            host=host,
            output_tail=first.output_tail,
            cause="lost",
        )
    lines = [f"Rank {first.rank} on {first.host} failed: {first.headline}"]
    if first.report is not None:
        lines.append(first.report.traceback.rstrip())
    if "No module named 'horovod'" in first.error:
        lines.append(f"Horovod is not installed on {first.host}. Run there: {BUILD_HOROVOD}")
    if first.output_tail.strip():
        lines += ["The end of its output:", first.output_tail.rstrip()]
    is_storage = first.report is not None and first.report.is_storage
    raise (WorkerStoreError if is_storage else WorkerFailedError)(
        "\n".join(line for line in lines if line),
        rank=first.rank,
        host=first.host,
        output_tail=first.output_tail,
        cause=_CAUSES.get(first.error_type, "raised"),
        error_type="" if first.error_type in _CAUSES else first.error_type,
        is_transient=first.report is not None and first.report.is_transient,
    )


def _blame(outcome: RankOutcome) -> tuple[int, float]:
    """Return a sort key for failures, the likeliest cause first.

    The end of a peer only breaks collectives, so such errors are consequences. Of ranks with
    Horovod's error, the first one printed which rank the others waited for, if one stalled.
    """
    consequences = {"aborted": 3, "HorovodInternalError": 2, "CollectiveError": 2, "lost": 1}
    level = consequences.get(outcome.error_type, 0)
    return level, outcome.rank if level == 2 else outcome.ended_at
