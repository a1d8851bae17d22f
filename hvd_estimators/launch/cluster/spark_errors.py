"""Typed errors for failed Spark jobs, derived from Spark's messages. Runs on the driver."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from hvd_estimators._util.spark_session import NO_JVM
from hvd_estimators.exceptions import (
    DependencyError,
    HvdEstimatorsError,
    JobCancelledError,
    ResultsError,
    SlotsError,
    StoreError,
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
        r"SparkContext (was|has been) shut ?down",
        JobCancelledError,
        "The Spark application has ended: the program stopped its session, or the cluster manager "
        "ended the application. Start it again; a fit with the same run_id resumes the run.",
    ),
    (r"Job \S+ cancelled|OPERATION_CANCEL", JobCancelledError, "The Spark job was cancelled."),
    (r"Py4JSecurityException", DependencyError, NO_JVM),
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
        r"StoreError: No space is left on a disk",
        StoreError,
        "The disk of temporary files is full on a machine that should start a rank.",
    ),
    (
        r"Cannot run program",
        DependencyError,
        "The executors cannot start Python. Set PYSPARK_PYTHON (or spark.pyspark.python) to a "
        "Python that exists on all machines. A relative path starts at an executor's working "
        "folder; Spark Connect's sessions have one below it (../environment/bin/python).",
    ),
    (
        r"PYTHON_VERSION_MISMATCH|Python in worker has different version",
        DependencyError,
        f"The executors run another version of Python than the driver ({sys.version.split()[0]}). "
        "Set PYSPARK_PYTHON (or spark.pyspark.python) to one of the same version on all machines.",
    ),
    (
        r"ModuleNotFoundError: No module named|Error from python worker:[^$]*No module named",
        DependencyError,
        "The executors' Python lacks a package. Install the driver's packages on all machines, or "
        "set PYSPARK_PYTHON to a Python that has them.",
    ),
]

_LOST = [
    (
        r"ExecutorLostFailure[^\n]*(Not receiving heartbeat|[Hh]eartbeat timed out)",
        "An executor has not answered; its machine, or the network to it, may be down",
    ),
    (
        r"Python worker exited unexpectedly|Python worker failed to connect back",
        "The Python process of an executor ended; the machine may have run out of memory",
    ),
    (r"ExecutorLostFailure[^\n]*preempted", "The cluster manager preempted an executor"),
    (r"ExecutorLostFailure[^\n]*[Dd]ecommission", "The machine of an executor was decommissioned"),
    (r"ExecutorLostFailure[^\n]*[Ww]orker lost", "The machine of an executor was lost"),
    (
        r"ExecutorLostFailure[^\n]*(exceeding (physical|virtual) memory|(code|status):? 137\b)",
        "An executor was killed; it may have used too much memory",
    ),
    (
        r"ExecutorLostFailure[^\n]*Remote RPC client disassociated",
        "An executor disconnected; it may have been killed, or Spark's master may have been "
        "restarted without recovery (spark.deploy.recoveryMode) and have ended its executors",
    ),
    (
        r"ExecutorLostFailure",
        "An executor was lost; it may have been killed, or its machine have run out of memory",
    ),
]


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
    cause = next((text for pattern, text in _LOST if re.search(pattern, message)), None)
    if cause is None and not all_failures:
        return None
    host, executor = failed_on(cluster, tag)
    where = f" on {host} (executor {executor})" if host else ""
    return WorkerFailedError(
        f"{cause or 'The Spark job of the ranks failed'}{where}. Spark says:\n{message}",
        host=host,
        cause="lost" if cause else None,
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
