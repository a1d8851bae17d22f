"""Stage-level scheduling: resources of the ranks' tasks, separate from other stages.

Runs on the driver, except for `rows_of_task`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import ParamError, SlotsError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class TaskResources:
    """Resources that each task of a job requests; by default, those in the application's settings.

    Attributes
    ----------
    resource_profile : pyspark.resource.ResourceProfile, optional
        Resources of each task and of its executor.
    gpus_per_task, cpus_per_task : int, optional
        Shorthand for a profile: GPUs and cores of each task, on the existing executors.

    Raises
    ------
    ParamError
        If a value is invalid, or both a profile and numbers are given.
    """

    resource_profile: Any = None
    gpus_per_task: int | None = None
    cpus_per_task: int | None = None

    def __post_init__(self) -> None:
        for name in ("gpus_per_task", "cpus_per_task"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParamError(f"{name}: expected 1 or more, a whole number, found {value!r}.")
            if self.resource_profile is not None:
                raise ParamError(
                    f"resource_profile and {name} are both set, and mean the same. Set one of them."
                )
        if self.resource_profile is not None:
            _check_profile(self.resource_profile)

    def describe(self) -> str:
        """Return a description of the request for messages; empty for the default."""
        if self.resource_profile is not None:
            requests = self.resource_profile.taskResources.values()
            each = ", ".join(f"{entry.resourceName}: {entry.amount:g}" for entry in requests)
            return f"resource_profile ({each or 'the settings of the application'} a task)"
        given = {"gpus_per_task": self.gpus_per_task, "cpus_per_task": self.cpus_per_task}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)

    def built(self) -> ResourceProfile | None:
        """Return the profile, or None for the default one."""
        if self.gpus_per_task is None and self.cpus_per_task is None:
            profile: ResourceProfile | None = self.resource_profile
            return profile
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        requests = TaskResourceRequests()
        if self.cpus_per_task is not None:
            requests = requests.cpus(self.cpus_per_task)
        if self.gpus_per_task is not None:
            requests = requests.resource("gpu", self.gpus_per_task)
        return ResourceProfileBuilder().require(requests).build

    def on(self, context: SparkContext) -> ResourceProfile | None:
        """Return the profile as registered with an application, or None for the default one.

        Raises
        ------
        SlotsError
            If the cluster manager does not support profiles, or rejects this one.
        """
        if self == TaskResources():
            return None
        return _registered(self, str(context.applicationId), context)


def _check_profile(profile: Any) -> None:
    from pyspark.resource import ResourceProfile

    if not isinstance(profile, ResourceProfile):
        raise ParamError(
            "resource_profile: expected a pyspark.resource.ResourceProfile, as "
            "ResourceProfileBuilder().require(TaskResourceRequests().resource('gpu', 1)).build "
            f"makes one (without parentheses), found {profile!r}."
        )
    for name, request in profile.taskResources.items():
        if name != "cpus" and request.amount != int(request.amount):
            raise ParamError(
                f"resource_profile: ranks cannot share a {name}, and a task asks for "
                f"{request.amount:g}. Set a whole number."
            )


# An application keeps every registered profile, so each one is registered only once.
_registered_profiles: dict[tuple[TaskResources, str], ResourceProfile | None] = {}


def _registered(
    resources: TaskResources, application: str, context: SparkContext
) -> ResourceProfile | None:
    key = (resources, application)
    if key not in _registered_profiles:
        # An RDD registers its profile with the application, and then returns it with its id.
        try:
            rdd: Any = context.parallelize([], 1)
            rdd = rdd.withResources(resources.built())
        except Exception as error:
            java = getattr(error, "java_exception", None)
            if java is None:
                raise
            message = str(java.getMessage()).rstrip(".")
            raise SlotsError(
                f"{resources.describe()}: Spark rejects it ({message}). Leave it out with a local "
                "master. Otherwise ask for less, or for resources of tasks only (resources of "
                "executors need dynamic allocation), or start Spark with more for each executor "
                "(spark.executor.cores, spark.executor.resource.gpu.amount)."
            ) from error
        _registered_profiles[key] = rdd.getResourceProfile()
    return _registered_profiles[key]


Task = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


def collect_from_tasks(
    session: SparkSession,
    num_tasks: int,
    task: Task,
    schema: str,
    profile: ResourceProfile | None,
    *,
    barrier: bool = True,
) -> list[Any]:
    """Run a job; return the rows of its tasks, with values accessible by column name.

    Parameters
    ----------
    session : SparkSession
        The session that runs the job.
    num_tasks : int
        Number of tasks.
    task : callable
        Takes Arrow batches, whose content has no meaning, and yields batches of results.
    schema : str
        Columns of the results.
    profile : ResourceProfile or None
        Resources that the tasks request.
    barrier : bool
        Whether all tasks run at the same time.
    """
    frame: Any = session.range(0, num_tasks, 1, num_tasks)
    knows_profiles = "profile" in inspect.signature(frame.mapInArrow).parameters
    if profile is not None and not knows_profiles:  # before PySpark 4
        numbers = session.sparkContext.parallelize(range(num_tasks), num_tasks)
        tasks: Any = numbers.withResources(profile)
        tasks = tasks.barrier() if barrier else tasks
        return list(tasks.mapPartitions(functools.partial(rows_of_task, task=task)).collect())
    given: dict[str, Any] = {} if profile is None else {"profile": profile}
    rows: list[Any] = frame.mapInArrow(task, schema, barrier=barrier, **given).collect()
    return rows


def rows_of_task(_: Iterator[Any], *, task: Task) -> Iterator[dict[str, Any]]:
    """Yield a task's results row by row. Runs in the task."""
    for batch in task(iter(())):
        yield from batch.to_pylist()
