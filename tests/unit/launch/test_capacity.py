"""Dynamically allocated executors, without Spark."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from processes import wait_until

from hvd_estimators.exceptions import SlotsError
from hvd_estimators.launch.cluster import application as clusters
from hvd_estimators.launch.cluster.application import Cluster
from hvd_estimators.launch.cluster.capacity import check_slots, most_slots
from hvd_estimators.launch.cluster.resources import TaskResources


def application(master: str = "yarn", **conf: str) -> Any:
    settings = {f"spark.{name.replace('__', '.')}": value for name, value in conf.items()}
    settings["spark.dynamicAllocation.enabled"] = "true"
    return SimpleNamespace(
        master=master,
        conf=settings,
        is_local=False,
        allocates_dynamically=True,
        knows_slots=True,
        task_slots=lambda: 0,
        executors=lambda: 0,
    )


@pytest.mark.parametrize(
    ("application", "resources", "most"),
    [
        (application(dynamicAllocation__maxExecutors="3"), {}, 3),
        (application(dynamicAllocation__maxExecutors="3", executor__cores="4"), {}, 12),
        (
            application(dynamicAllocation__maxExecutors="3", executor__cores="4"),
            {"cpus_per_task": 2},
            6,
        ),
        (
            application(dynamicAllocation__maxExecutors="3", executor__cores="4", task__cpus="3"),
            {},
            3,
        ),
        # Executors of a standalone cluster have as many cores as their machine.
        (application("spark://host", dynamicAllocation__maxExecutors="3"), {}, None),
        (application(executor__cores="4"), {}, None),
    ],
)
def test_the_maximum_number_of_slots_follows_from_the_settings(
    application: Any, resources: dict[str, int], most: int | None
) -> None:
    assert most_slots(application, TaskResources(**resources)) == most


def test_more_ranks_than_possible_slots_are_rejected_at_once() -> None:
    cluster = application(dynamicAllocation__maxExecutors="2", executor__cores="2")

    with pytest.raises(SlotsError, match=r"never more than 4: .*maxExecutors is 2\. "):
        check_slots(cluster, 5, 600.0, TaskResources())


def context_with(settings: dict[str, str]) -> Any:
    conf = SimpleNamespace(set=settings.__setitem__)
    return SimpleNamespace(
        master="yarn",
        getConf=lambda: SimpleNamespace(getAll=lambda: list(settings.items())),
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: conf)),
    )


class AcceptingCluster(Cluster):
    """Cluster that shows jobs, none of whose tasks start."""

    shown: frozenset[str] = frozenset()

    def tagged(self, *args: Any) -> Any:
        return contextlib.nullcontext()

    def jobs(self, tag: str) -> set[int]:
        return {1} & {int(tag in self.shown)}

    def started_tasks(self, tag: str) -> int:
        return 0

    def slots_beside(self, *args: Any) -> None:
        return None

    def cancel(self, tag: str) -> None:
        pass


def test_spark_accepts_barrier_jobs_while_any_caller_needs_it() -> None:
    settings = {"spark.dynamicAllocation.enabled": "true"}
    context = context_with(settings)
    inside, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        cluster = AcceptingCluster(context)
        with cluster.accepting_barrier_jobs() as restore:
            inside.set()
            leave.wait(10)
            cluster.shown = frozenset({"job"})
            restore("other")
            assert settings["spark.dynamicAllocation.enabled"] == "false"
            restore("job")
            ended.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    # The original setting is still known although the current one differs.
    assert settings["spark.dynamicAllocation.enabled"] == "false"
    assert Cluster(context).allocates_dynamically
    with Cluster(context).accepting_barrier_jobs():
        leave.set()
        assert settings["spark.dynamicAllocation.enabled"] == "false"
    wait_until(lambda: settings["spark.dynamicAllocation.enabled"] == "true")
    # The other job still runs.
    assert thread.is_alive()
    ended.set()
    thread.join()
    assert settings["spark.dynamicAllocation.enabled"] == "true"
    assert clusters._accepting == 0
