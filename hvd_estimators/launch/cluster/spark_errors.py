"""Typed errors for failed Spark jobs, derived from Spark's messages. Runs on the driver."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from hvd_estimators.exceptions import (
    DependencyError,
    HvdEstimatorsError,
    JobCancelledError,
    ResultsError,
    SlotsError,
    WorkerFailedError,
)
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.output import shortened
from hvd_estimators.launch.task.run import LESS_RESULTS

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster

_MESSAGE_CHARS = 4000


# Pattern of Spark's message, and the error and the message to raise.
_KINDS: list[tuple[str, type[HvdEstimatorsError], str]] = [
    (
        r"Job \S+ cancelled|OPERATION_CANCEL|SparkContext (was|has been) shut ?down",
        JobCancelledError,
        "The Spark job was cancelled, or its application has ended. A fit with the same run_id "
        "resumes the run.",
    ),
    (
        r"spark\.driver\.maxResultSize",
        ResultsError,
        f"The driver rejects the job's results, because they are too large. {LESS_RESULTS}",
    ),
    (
        r"barrier stage that requires more slots",
        SlotsError,
        "The cluster has fewer task slots than ranks.",
    ),
    (
        r"Cannot run program|Python in worker has different version|PYTHON_VERSION_MISMATCH"
        r"|ModuleNotFoundError: No module named|Error from python worker:[^$]*No module named",
        DependencyError,
        "The executors' Python does not start, lacks a package, or has another version than the "
        f"driver's ({sys.version.split()[0]}). Install the driver's packages on all machines, and "
        "set PYSPARK_PYTHON (or spark.pyspark.python) to a Python that exists on all of them. A "
        "relative path starts at an executor's working folder; Spark Connect's sessions have one "
        "below it (../environment/bin/python).",
    ),
]

_LOST = r"ExecutorLostFailure|Python worker (exited unexpectedly|failed to connect back)"


def typed_failure(
    error: BaseException, cluster: Cluster, tag: str, *, all_failures: bool
) -> HvdEstimatorsError | None:
    """Return the typed error to raise instead of Spark's.

    Parameters
    ----------
    error : BaseException
        The error that the jobs raised.
    cluster : Cluster
        Provides the machine on which a task failed.
    tag : str
        A tag that only these jobs have.
    all_failures : bool
        Whether to return an error for any other failure, too.

    Returns
    -------
    HvdEstimatorsError or None
        None if the error is not Spark's, or should be raised unchanged.
    """
    # If the JVM itself has ended, py4j raises a ConnectionError.
    if not isinstance(error, (Py4JError, PySparkException, ConnectionError)) or isinstance(
        error, HvdEstimatorsError
    ):
        return None
    message = _message(error)
    for pattern, error_class, summary in _KINDS:
        if re.search(pattern, message):
            return error_class(f"{summary} Spark says:\n{message}")
    is_lost = re.search(_LOST, message) is not None
    if not (is_lost or all_failures):
        return None
    host, executor = failed_on(cluster, tag)
    where = f" on {host} (executor {executor})" if host else ""
    what = "An executor, or its Python process, has ended" if is_lost else "The job of ranks failed"
    return WorkerFailedError(
        f"{what}{where}. Spark says:\n{message}", host=host, cause="lost" if is_lost else None
    )


def _message(error: BaseException) -> str:
    """Return Spark's message without the JVM's stack traces."""
    # Over Spark Connect, a separate line precedes the stack trace.
    lines = str(error).partition("\n\nJVM stacktrace:")[0].splitlines()
    lines_without_stack = [
        line.removeprefix(": ")
        for line in lines
        if line.strip()
        and not re.match(r"\s+at |\s*\.\.\. \d+ more|An error occurred while calling", line)
    ]
    return shortened("\n".join(lines_without_stack), _MESSAGE_CHARS)


def failed_on(cluster: Cluster, tag: str) -> tuple[str | None, str | None]:
    """Return the host and executor of the task that failed first; both None if unknown.

    Waits for a moment, because Spark's information arrives after the failure.
    """
    deadline = time.monotonic() + timeouts.TASK_STATUS
    try:
        while True:
            failed = cluster.failed_tasks(tag)
            if failed is None:
                return None, None
            if failed:
                return min(failed)[1:]
            if time.monotonic() > deadline:
                return None, None
            time.sleep(timeouts.TASK_STATUS_POLL)
    except Exception:
        return None, None  # the context has been stopped
