"""Resource requests of tasks, and the errors if a cluster has too few of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

from hvd_estimators.exceptions import ParamError, SlotsError
from hvd_estimators.launch import SparkBackend
from hvd_estimators.launch.cluster.capacity import check_slots
from hvd_estimators.launch.cluster.resources import TaskResources

pytestmark = pytest.mark.versions


def profile(**amounts: float) -> Any:
    requests = TaskResourceRequests().cpus(1)
    for name, amount in amounts.items():
        requests = requests.resource(name, amount)
    return ResourceProfileBuilder().require(requests).build


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus_per_task": 0}, "gpus_per_task: expected 1 or more"),
        ({"gpus_per_task": 0.5}, "whole number, found 0.5"),
        ({"cpus_per_task": True}, "cpus_per_task: expected 1 or more"),
        ({"resource_profile": "gpu"}, "expected a pyspark.resource.ResourceProfile"),
        ({"resource_profile": ResourceProfileBuilder()}, "without parentheses"),
        ({"resource_profile": profile(gpu=0.5)}, "task asks for 0.5"),
        ({"resource_profile": profile(gpu=1), "gpus_per_task": 1}, "both set"),
    ],
)
def test_invalid_requests_are_rejected_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        SparkBackend(2, **given)


def cluster(slots: int, *, is_local: bool = False, **conf: str) -> Any:
    """An application whose executors have all registered."""
    return SimpleNamespace(
        master="local[2]" if is_local else "local-cluster[1,2,1024]",
        is_local=is_local,
        allocates_dynamically=False,
        knows_slots=True,
        conf={f"spark.{name.replace('__', '.')}": value for name, value in conf.items()},
        age=100.0,
        task_slots=lambda: slots,
        executors=lambda: 0 if is_local else 1,
    )


@pytest.mark.parametrize(
    ("application", "resources", "message"),
    [
        (cluster(2, is_local=True), {}, r"num_proc: 5 ranks .* has 2\. Set num_proc to 2 or less"),
        (cluster(1, task__cpus="2"), {}, r"let each task ask for less \(spark\.task\.cpus"),
        (
            cluster(1),
            {"gpus_per_task": 2},
            r"has 1 with gpus_per_task=2\. Set num_proc to 1 .*spark\.executor\.resource\.gpu",
        ),
        (cluster(0), {"gpus_per_task": 9}, r"has 0 with gpus_per_task=9\. .*start Spark with"),
    ],
)
def test_too_few_slots_are_an_error_with_a_remedy(
    application: Any, resources: dict[str, Any], message: str
) -> None:
    check_slots(cluster(5), 5, 600.0, TaskResources(**resources))
    with pytest.raises(SlotsError, match=message):
        check_slots(application, 5, 600.0, TaskResources(**resources))
