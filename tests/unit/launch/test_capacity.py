"""Dynamically allocated executors, without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hvd_estimators.launch.cluster.application import Cluster


def context_with(settings: dict[str, str], application: str) -> Any:
    conf = SimpleNamespace(set=settings.__setitem__)
    return SimpleNamespace(
        master="yarn",
        applicationId=application,
        getConf=lambda: SimpleNamespace(getAll=lambda: list(settings.items())),
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: conf)),
    )


def test_spark_accepts_barrier_jobs_and_the_setting_is_still_known() -> None:
    settings = {"spark.dynamicAllocation.enabled": "true"}
    context = context_with(settings, "dynamic")
    Cluster(context).accept_barrier_jobs()
    assert settings["spark.dynamicAllocation.enabled"] == "false"
    assert Cluster(context).allocates_dynamically

    fixed = context_with({"spark.dynamicAllocation.enabled": "false"}, "fixed")
    Cluster(fixed).accept_barrier_jobs()
    assert not Cluster(fixed).allocates_dynamically
