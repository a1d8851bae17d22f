"""Names in Spark's JVM that are not Spark's public interface, each where it was."""

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
        "analyzed withCachedData",
        "prepare/lineage.py, prepare/lineage.py",
        "whether a DataFrame gives the same rows twice, and which cached data it reads",
    ),
    (
        f"{CATALYST}.plans.logical.LogicalPlan",
        "children collectLeaves deterministic expressions isStreaming schema stats subqueriesAll "
        "toJSON",
        "prepare/lineage.py",
        "whether a DataFrame gives the same rows twice, in the same order, and how many at most",
    ),
    (
        f"{CATALYST}.plans.logical.Statistics",
        "sizeInBytes",
        "prepare/lineage.py",
        "how many files a few rows are written to",
    ),
    (
        f"{CATALYST}.expressions.Expression",
        "children deterministic",
        "prepare/lineage.py",
        "whether an expression gives the same values twice",
    ),
    (f"{CATALYST}.expressions.ScalaUDF", "function", "prepare/lineage.py", "Spark ML's functions"),
    (f"{EXECUTION}.LogicalRDD", "rdd", "prepare/lineage.py", "whether its rows have an order"),
    (
        "org.apache.spark.rdd.RDD",
        "outputDeterministicLevel",
        "prepare/lineage.py",
        "whether its rows have an order",
    ),
    (
        f"{EXECUTION}.datasources.LogicalRelation",
        "relation",
        "prepare/sources.py",
        "the files that a DataFrame reads",
    ),
    (
        f"{EXECUTION}.datasources.HadoopFsRelation",
        "location",
        "prepare/sources.py",
        "the files that a DataFrame reads",
    ),
    (
        f"{EXECUTION}.datasources.InMemoryFileIndex",
        "allFiles",
        "prepare/sources.py",
        "the sizes of files when Spark listed them",
    ),
    (
        f"{EXECUTION}.columnar.InMemoryRelation",
        "cacheBuilder",
        "prepare/sources.py",
        "the cached data that a DataFrame reads",
    ),
    (
        "org.apache.spark.sql.internal.SessionState",
        "newHadoopConf",
        "prepare/sources.py",
        "filesystems with the session's settings",
    ),
    (
        "org.apache.spark.SparkContext",
        "getExecutorMemoryStatus maxNumConcurrentTasks resourceProfileManager statusStore",
        "launch/cluster/slots.py, launch/cluster/jobs.py, launch/cluster/spark_errors.py",
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
def test_a_name_in_the_jvm_is_where_it_was(
    spark: Any, owner: str, method: str, used_in: str, why: str
) -> None:
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    message = f"Spark moved {owner}.{method}. It is used in {used_in} for: {why}"
    try:
        found = loader.loadClass(owner).getMethods()
    except Exception as error:
        pytest.fail(f"{message} ({error})")
    assert method in {entry.getName() for entry in found}, message


def test_an_expression_declares_whether_it_is_random_itself(spark: Any) -> None:
    """Used in prepare/lineage.py: an expression that does not is as random as what it is of."""
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    nothing = spark.sparkContext._gateway.new_array(spark._jvm.java.lang.Class, 0)
    declared = {}
    for name in ("Add", "Alias", "Not", "Rand", "ScalaUDF", "Uuid"):
        cls = loader.loadClass(f"{CATALYST}.expressions.{name}")
        declared[name] = cls.getMethod("deterministic", nothing).getDeclaringClass().getSimpleName()
    assert {name for name, owner in declared.items() if owner == "Expression"} == {
        "Add",
        "Alias",
        "Not",
    }
