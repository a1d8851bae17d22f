"""Dynamically allocated executors, without Spark."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.exceptions import SlotsError
from hvd_estimators.launch.cluster.application import Cluster
from hvd_estimators.launch.cluster.connect import ConnectCluster


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


@pytest.mark.parametrize(
    ("master", "rejects"),
    [("local[4]", False), ("spark://localhost:7077", True), ("local-cluster[2,1,512]", True)],
)
def test_connect_servers_that_reject_barrier_jobs_are_named(master: str, rejects: bool) -> None:
    cluster = object.__new__(ConnectCluster)
    cluster.conf = {"spark.master": master, "spark.dynamicAllocation.enabled": "true"}
    expected = pytest.raises(SlotsError, match="Start it with false")
    with expected if rejects else contextlib.nullcontext():
        cluster.accept_barrier_jobs()
