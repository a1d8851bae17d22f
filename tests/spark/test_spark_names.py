"""Names in Spark's JVM that are not part of Spark's public interface."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.spark

CATALYST = "org.apache.spark.sql.catalyst"
EXECUTION = "org.apache.spark.sql.execution"

TABLE = [
    # class, methods, used in, for
    (
        f"{EXECUTION}.QueryExecution",
        "analyzed",
        "prepare/dataframe.py",
        "whether rows have an order, and how many there are at most",
    ),
    (
        f"{CATALYST}.plans.logical.LogicalPlan",
        "collectLeaves schema stats subqueriesAll toJSON",
        "prepare/dataframe.py",
        "whether rows have an order, and how many there are at most",
    ),
    (
        f"{CATALYST}.plans.logical.Statistics",
        "sizeInBytes",
        "prepare/dataframe.py",
        "how many files a few rows are written to",
    ),
    (f"{EXECUTION}.LogicalRDD", "rdd", "prepare/dataframe.py", "whether its rows have an order"),
    (
        "org.apache.spark.rdd.RDD",
        "outputDeterministicLevel",
        "prepare/dataframe.py",
        "whether its rows have an order",
    ),
    (
        "org.apache.spark.sql.internal.SessionState",
        "newHadoopConf",
        "prepare/connectors.py",
        "filesystems with the session's settings",
    ),
    (
        "org.apache.spark.SparkContext",
        "getExecutorMemoryStatus maxNumConcurrentTasks resourceProfileManager statusStore",
        "launch/cluster/application.py, launch/cluster/jobs.py, launch/cluster/spark_errors.py",
        "task slots, and the executors that are registered",
    ),
    (
        "org.apache.spark.resource.ResourceProfileManager",
        "defaultResourceProfile resourceProfileFromId",
        "launch/cluster/application.py",
        "the task slots of what tasks ask for",
    ),
    (
        "org.apache.spark.SparkStatusTracker",
        "getJobIdsForTag",
        "launch/cluster/jobs.py, launch/cluster/spark_errors.py",
        "the jobs of a run, without the group, which is the user's",
    ),
    (
        "org.apache.spark.status.AppStatusStore",
        "activeStages lastStageAttempt taskList",
        "launch/cluster/jobs.py, launch/cluster/spark_errors.py",
        "tasks that run, and tasks that failed",
    ),
]


@pytest.mark.parametrize(
    ("owner", "method", "used_in", "why"),
    [
        pytest.param(owner, method, used_in, why, id=f"{owner.rpartition('.')[2]}.{method}")
        for owner, methods, used_in, why in TABLE
        for method in methods.split()
    ],
)
def test_internal_names_of_the_jvm_exist(
    spark: Any, owner: str, method: str, used_in: str, why: str
) -> None:
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    message = f"Spark moved {owner}.{method}. It is used in {used_in} for: {why}"
    try:
        found = loader.loadClass(owner).getMethods()
    except Exception as error:
        pytest.fail(f"{message} ({error})")
    assert method in {entry.getName() for entry in found}, message
