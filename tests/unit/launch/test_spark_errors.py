"""Typed errors for the messages of failed jobs in Spark 3.5 and 4."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException

from hvd_estimators.exceptions import (
    DependencyError,
    HvdEstimatorsError,
    JobCancelledError,
    ResultsError,
    SlotsError,
    WorkerFailedError,
)
from hvd_estimators.launch.cluster.spark_errors import typed_failure

STOPPED: Any = None
"""A context that answers no queries."""

BARRIER = (
    "An error occurred while calling o203.collectToPython.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from "
    "a failed barrier ResultStage. Most recent failure reason: Stage failed because barrier task "
    "ResultTask(2, 1) finished unsuccessfully.\n{}\n"
    "\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2833)\n"
    "\t... 21 more\n"
)


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (
            ": org.apache.spark.SparkException: Job 0 cancelled part of cancelled job group mine",
            JobCancelledError,
            "Job 0 cancelled part of cancelled job group mine",
        ),
        (
            "[SPARK_JOB_CANCELLED] Job 7 cancelled as part of cancellation of all jobs "
            "SQLSTATE: XXKDA",
            JobCancelledError,
            "cancellation of all jobs",
        ),
        (
            "Job 3 cancelled because SparkContext was shut down",
            JobCancelledError,
            "its application has ended.*shut down",
        ),
        (
            "Total size of serialized results of 1 tasks (5.1 MiB) is bigger than "
            "spark.driver.maxResultSize (2.0 MiB)",
            ResultsError,
            "5.1 MiB",
        ),
        (
            BARRIER.format(
                'java.io.IOException: Cannot run program "/no/such/python": error=2, No such file'
            ),
            DependencyError,
            "PYSPARK_PYTHON.*/no/such/python",
        ),
        (
            BARRIER.format("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9"),
            DependencyError,
            "another version than the driver",
        ),
        (
            BARRIER.format("ModuleNotFoundError: No module named 'hvd_estimators'"),
            DependencyError,
            "lacks a package.*'hvd_estimators'",
        ),
        (
            "[SPARK-24819]: Barrier execution mode does not allow run a barrier stage that "
            "requires more slots than the total number of slots in the cluster currently.",
            SlotsError,
            "fewer task slots",
        ),
        (
            BARRIER.format("org.apache.spark.SparkException: Python worker exited unexpectedly"),
            WorkerFailedError,
            "its Python process, has ended",
        ),
        (
            BARRIER.format(
                "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) "
                "Reason: Command exited with code 137"
            ),
            WorkerFailedError,
            "An executor.*code 137",
        ),
        (
            BARRIER.format(
                "ExecutorLostFailure (executor 0 exited unrelated to the running tasks) "
                "Reason: worker lost: Not receiving heartbeat for 60 seconds"
            ),
            WorkerFailedError,
            "An executor.*for 60 seconds",
        ),
        (
            BARRIER.format(
                "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) "
                "Reason: Executor heartbeat timed out after 127104 ms"
            ),
            WorkerFailedError,
            "An executor.*127104 ms",
        ),
        (
            BARRIER.format(
                "ExecutorLostFailure (executor 137 exited caused by one of the running tasks) "
                "Reason: Command exited with code 52"
            ),
            WorkerFailedError,
            "An executor.*code 52",
        ),
        # The reasons are those of YarnAllocator, CoarseGrainedSchedulerBackend and
        # StandaloneSchedulerBackend in Spark.
        *(
            (
                BARRIER.format(f"ExecutorLostFailure (executor 1 exited {how}) Reason: {reason}"),
                WorkerFailedError,
                f"An executor.*{reason[-12:]}",
            )
            for how, reason in [
                (
                    "unrelated to the running tasks",
                    "Container container_17_0001_01_000002 on host: node-2 was preempted.",
                ),
                (
                    "unrelated to the running tasks",
                    "Executor decommission: worker decommissioned because of kill request",
                ),
                ("unrelated to the running tasks", "worker lost: 10.0.0.7:35201 got disassociated"),
                (
                    "caused by one of the running tasks",
                    "Container killed by YARN for exceeding physical memory limits. 1.5 GB used",
                ),
                (
                    "caused by one of the running tasks",
                    "The executor with id 1 exited with exit code 137(SIGKILL, possible OOM).",
                ),
                (
                    "caused by one of the running tasks",
                    "Container from a bad node: container_1_2_3 on host: node-2. Exit status: 137.",
                ),
                (
                    "caused by one of the running tasks",
                    "Remote RPC client disassociated. Likely due to containers exceeding "
                    "thresholds, or network issues.",
                ),
                ("caused by one of the running tasks", "something that Spark has not said before"),
            ]
        ),
    ],
)
@pytest.mark.parametrize("all_failures", [True, False])
def test_failures_are_classified_by_sparks_message(
    message: str, error: type[HvdEstimatorsError], says: str, all_failures: bool
) -> None:
    raised = PySparkException(message)

    typed = typed_failure(raised, STOPPED, "tag", all_failures=all_failures)

    assert type(typed) is error
    flat = " ".join(str(typed).split())
    assert says.split(".*")[0] in flat
    assert says.split(".*")[-1] in flat
    assert "DAGScheduler.scala" not in flat
    assert "more" not in flat.split()[-1:]


def test_other_spark_failures_are_typed_only_for_jobs_of_ranks() -> None:
    message = BARRIER.format("OSError: No space left on device" + "x" * 10**6)
    for raised in (PySparkException(message), Py4JNetworkError("Answer from Java side is empty")):
        assert typed_failure(raised, STOPPED, "tag", all_failures=False) is None
        typed = typed_failure(raised, STOPPED, "tag", all_failures=True)
        assert isinstance(typed, WorkerFailedError)
        assert len(str(typed)) < 5000


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ValueError("cancelled"), WorkerFailedError("Job 1 cancelled")]
)
def test_errors_of_other_origin_are_left_alone(error: BaseException) -> None:
    assert typed_failure(error, STOPPED, "tag", all_failures=True) is None
