"""Exceptions of this package, one class per kind of problem.

Every class except the base also derives from a built-in exception. Every message states the
expected value, the actual value, and the parameter to set or the command to run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint for a message about an unknown name: the most similar known name.

    Returns an empty string if no known name is similar.
    """
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


MOST_LISTED = 20
"""Maximum number of names in a message."""


def listed(names: Iterable[object]) -> str:
    """Return names as a part of a message: the first ones, and the number of the others."""
    texts = list(map(str, names))
    others = len(texts) - MOST_LISTED
    return ", ".join(texts[:MOST_LISTED]) + (f" and {others} others" if others > 0 else "")


class HvdEstimatorsError(Exception):
    """Base class of this package's exceptions.

    Parameters
    ----------
    problem : str
        What was expected, and what was found.
    param : str, optional
        The parameter that the message begins with. None if ``problem`` names it.
    column : str, optional
        The column that the problem is about. A fit finds its parameter, if ``param`` is None.
    remedy : str, optional
        What to set or to do, if ``problem`` does not say it.

    Attributes
    ----------
    problem, param, column, remedy
        As given.
    default : str or None
        The parameter's default value, if the caller has not set it.
    is_transient : bool
        Whether ranks that are launched again need not fail in the same way.
    """

    is_transient: bool = False

    def __init__(
        self,
        problem: str = "",
        *,
        param: str | None = None,
        column: str | None = None,
        remedy: str = "",
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.param = param
        self.column = column
        self.remedy = remedy
        self.default: str | None = None

    def __str__(self) -> str:
        subject = self.param
        if self.default is not None:
            subject = f"{self.param} is not set, and its default is {self.default}"
        named = f"{subject}: {self.problem}" if subject else self.problem
        # Several lines, such as a rank's output, end with the problem.
        separator = "\n" if "\n" in named else " "
        return f"{named}{separator}{self.remedy}" if self.remedy else named

    def add_remedy(self, text: str) -> None:
        """Add a sentence to the remedy."""
        self.remedy = f"{self.remedy} {text}" if self.remedy else text


class ParamError(HvdEstimatorsError, ValueError):
    """Invalid parameter, or invalid combination of parameters."""


class ColumnError(HvdEstimatorsError, ValueError):
    """Missing column, or column with an unsupported type."""


class DataError(HvdEstimatorsError, ValueError):
    """Unusable rows: nulls, ragged arrays, or too few rows."""


class ShapeError(HvdEstimatorsError, ValueError):
    """Mismatch between columns, model and labels."""


class StoreError(HvdEstimatorsError, OSError):
    """Unreachable store, or missing object in the store."""


class StoreUnavailableError(StoreError):
    """Store that still fails after all retries."""

    is_transient = True


class PredictionError(HvdEstimatorsError, RuntimeError):
    """Failure of a model on a batch of rows during prediction."""


class ReaderError(HvdEstimatorsError, RuntimeError):
    """Termination of a rank's data reader, which cannot continue."""

    is_transient = True


class LeftOutError(HvdEstimatorsError, ImportError):
    """Use of a ``horovod.spark`` name that this package does not provide."""


class LoggerError(HvdEstimatorsError, RuntimeError):
    """Failure of a logger (``loggers``) to start, before a new run trains."""


class SlotsError(HvdEstimatorsError, RuntimeError):
    """Too few task slots in the cluster for the requested ranks to run at the same time."""


class GpuError(HvdEstimatorsError, RuntimeError):
    """Missing GPUs for the ranks."""


class NotFiniteError(HvdEstimatorsError, FloatingPointError):
    """NaN or infinite loss or model parameter (``terminate_on_nan``)."""


class JobCancelledError(HvdEstimatorsError, RuntimeError):
    """Cancellation of the Spark job: by its group, by a tag, or by stopping Spark."""


class TrainingInterruptedError(HvdEstimatorsError, RuntimeError):
    """Stop of training before a machine goes: SIGTERM, ``preemption_check``, decommissioning.

    All ranks end together after a step, and the exception is raised on the ranks.
    """

    is_transient = True


class UnreachableError(HvdEstimatorsError, ConnectionError):
    """Failed network connection between the hosts of a job."""


class CollectiveError(HvdEstimatorsError, RuntimeError):
    """Failure of an operation over all ranks, usually because another rank has ended or stalls.

    Raised on the ranks, with ``collectives="torch"``. Horovod raises its own
    ``HorovodInternalError``.
    """

    is_transient = True


class ResultsError(HvdEstimatorsError, RuntimeError):
    """Rank results that did not reach the driver or that the driver could not use."""


class DependencyError(HvdEstimatorsError, ImportError):
    """Missing or incompatible version of Python or of a required package."""


class BuildError(HvdEstimatorsError, RuntimeError):
    """Failure to build Horovod."""


class WorkerFailedError(HvdEstimatorsError, RuntimeError):
    """Failure of a rank, or of the Spark task or executor that ran it, during a job.

    Attributes
    ----------
    rank : int or None
        The rank that failed first. None if unknown, for example because an executor was lost.
    host : str or None
        The rank's host.
    output_tail : str
        The end of the rank's standard output and standard error.
    cause : str or None
        ``"raised"``: the rank's function raised an exception. ``"exited"``: the process exited by
        itself, with an exit status and without a result. ``"killed"``: a signal ended the process.
        ``"stalled"``: the rank made no progress. ``"lost"``: the executor or machine was lost.
        None: Spark reports no cause.
    error_type : str
        Class name of the exception if the rank raised one, otherwise empty.
    is_transient : bool
        Whether relaunched ranks need not fail in the same way. The rank itself says so of the
        exception that it raised; a rank that was killed, lost or stalled counts as transient.
    relaunches : int
        Number of earlier relaunches of the ranks, by `run_elastic` or by a fit with
        ``max_restarts``.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        output_tail: str = "",
        cause: str | None = None,
        error_type: str = "",
        is_transient: bool = False,
        relaunches: int = 0,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.output_tail = output_tail
        self.cause = cause
        self.error_type = error_type
        self.is_transient = is_transient or cause in ("killed", "stalled", "lost")
        self.relaunches = relaunches


class WorkerStoreError(WorkerFailedError, StoreError):
    """Failure of a rank because of storage: a full disk, missing permissions, a damaged file.

    The message names the rank and the file. Caught as `StoreError`, like such errors of the driver,
    or as `WorkerFailedError`.
    """
