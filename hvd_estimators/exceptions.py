"""Typed errors: one class per kind of problem, each also one of Python's own where that helps.

Every message says what was expected, what was found and what to set or run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BuildError",
    "ColumnError",
    "DataError",
    "DependencyError",
    "GpuError",
    "HvdEstimatorsError",
    "JobCancelledError",
    "LeftOutError",
    "NotFiniteError",
    "ParamError",
    "PredictionError",
    "ReaderError",
    "ResultsError",
    "ShapeError",
    "SlotsError",
    "StoreError",
    "StoreUnavailableError",
    "TrainingInterruptedError",
    "UnreachableError",
    "WorkerFailedError",
    "did_you_mean",
]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known one that is most like it.

    Empty where none is.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class HvdEstimatorsError(Exception):
    """Base of every error that this package raises on purpose."""


class ParamError(HvdEstimatorsError, ValueError):
    """A parameter's value, or a combination of parameters, is not usable."""


class ColumnError(HvdEstimatorsError, ValueError):
    """A column is missing from the data or has a type that cannot be trained on."""


class DataError(HvdEstimatorsError, ValueError):
    """The rows themselves are not usable: nulls, ragged arrays, too few of them."""


class ShapeError(HvdEstimatorsError, ValueError):
    """Columns, model and labels do not fit each other."""


class StoreError(HvdEstimatorsError, OSError):
    """The store cannot be reached, or does not hold what was asked for."""


class StoreUnavailableError(StoreError):
    """The store has not answered as it should for as long as that was tried again."""


class PredictionError(HvdEstimatorsError, RuntimeError):
    """A model failed on a batch of rows that it was to predict on."""


class ReaderError(HvdEstimatorsError, RuntimeError):
    """What reads the rows for a rank has ended, and cannot go on."""


class LeftOutError(HvdEstimatorsError, ImportError):
    """A name of ``horovod.spark`` was asked for that this package leaves out."""


class SlotsError(HvdEstimatorsError, RuntimeError):
    """The cluster cannot run as many ranks at the same time as were asked for."""


class GpuError(HvdEstimatorsError, RuntimeError):
    """The ranks do not have the GPUs that they need."""


class NotFiniteError(HvdEstimatorsError, FloatingPointError):
    """A loss, or a parameter of the model, has become NaN or infinite (``terminate_on_nan``)."""


class JobCancelledError(HvdEstimatorsError, RuntimeError):
    """Somebody cancelled the Spark job: by its group, by a tag, or by stopping Spark."""


class TrainingInterruptedError(HvdEstimatorsError, RuntimeError):
    """The ranks were asked to end (SIGTERM), and ended together after a step. Raised in ranks."""


class UnreachableError(HvdEstimatorsError, ConnectionError):
    """The hosts of a job do not reach each other."""


class ResultsError(HvdEstimatorsError, RuntimeError):
    """What the ranks returned did not reach the driver, or nothing could be made of it there."""


class DependencyError(HvdEstimatorsError, ImportError):
    """A Python, or a package, that this needs is not installed, or not in a version that works."""


class BuildError(HvdEstimatorsError, RuntimeError):
    """Horovod could not be built."""


class WorkerFailedError(HvdEstimatorsError, RuntimeError):
    """A rank failed while the job ran, or what Spark ran it in.

    Attributes
    ----------
    rank : int or None
        The rank that failed first; None where it is not known, as where an executor has ended.
    host : str or None
        The machine that it ran on.
    output_tail : str
        The end of what the rank wrote to its standard output and error.
    cause : str or None
        ``"raised"``: an exception left the function. ``"exited"``: the process ended by itself,
        with an exit status and without a result. ``"killed"``: a signal ended it. ``"stalled"``: it
        made no progress. ``"lost"``: its executor or machine has gone. None: Spark names no cause.
    error_type : str
        The exception's class where one was raised, else empty.
    relaunches : int
        How often the ranks had been launched again before this, by `run_elastic` or by a fit with
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
        relaunches: int = 0,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.output_tail = output_tail
        self.cause = cause
        self.error_type = error_type
        self.relaunches = relaunches
