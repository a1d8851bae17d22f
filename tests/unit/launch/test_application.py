"""Facts about a Spark application that need no call to its JVM."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from hvd_estimators import launch
from hvd_estimators._util.spark_session import using_session
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.launch import SparkBackend
from hvd_estimators.launch.cluster.application import Cluster


def application(master: str, python: str = sys.executable, **conf: str) -> Cluster:
    found = {f"spark.{name.replace('_', '.')}": value for name, value in conf.items()}
    context: Any = SimpleNamespace(
        master=master,
        pythonExec=python,
        applicationId="app-1",
        getConf=lambda: SimpleNamespace(getAll=lambda: list(found.items())),
    )
    return Cluster(context)


@pytest.mark.parametrize(
    ("master", "is_local"),
    [
        ("local", True),
        ("local[2]", True),
        ("local[*, 3]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://localhost:7077", False),
        ("yarn", False),
    ],
)
def test_executors_reach_the_driver_at_its_host_unless_it_is_local(
    master: str, is_local: bool
) -> None:
    cluster = application(master, driver_host="10.0.0.7")

    assert cluster.is_local == is_local
    assert cluster.driver_host() == ("127.0.0.1" if is_local else "10.0.0.7")


@pytest.mark.parametrize(
    ("master", "enabled", "expected"),
    [
        ("yarn", "true", True),
        ("spark://host:7077", "false", False),
        ("local-cluster[2,1,1024]", "true", True),
        ("local[2]", "true", False),  # Spark ignores the setting
    ],
)
def test_dynamic_allocation_follows_the_setting(master: str, enabled: str, expected: bool) -> None:
    cluster = application(master, dynamicAllocation_enabled=enabled)

    assert cluster.allocates_dynamically == expected


@pytest.mark.parametrize("name", ["spark.app.id", "spark.master"])
def test_a_connect_server_that_hides_its_settings_is_named(name: str) -> None:
    settings = {"spark.app.id": "app-1", "spark.master": "spark://host:7077"}

    def get(asked: str, default: None) -> str | None:
        if asked == name:
            raise PySparkException(f"[CONFIG_NOT_AVAILABLE] Configuration {asked} is not available")
        return settings.get(asked, default)

    session: Any = SimpleNamespace(
        conf=SimpleNamespace(get=get), client=SimpleNamespace(host="managed.example")
    )
    session.registerProgressHandler = print
    asks = functools.partial(SparkBackend(2).run, len, ["a"])
    if name == "spark.app.id":
        asks = SparkBackend().num_processes  # type: ignore[assignment]
    with (
        using_session(session),
        pytest.raises(DependencyError, match=rf"{name}.*not supported.*LocalBackend"),
    ):
        asks()


def test_only_the_application_module_accesses_sparks_jvm() -> None:
    """A Spark Connect session has no JVM."""
    folder = Path(launch.__path__[0])
    private = re.compile(r"\._(?:jsc|jvm|gateway|jsparkSession|jdf|sc)\b")

    files = [path for path in folder.rglob("*.py") if private.search(path.read_text())]
    assert [str(path.relative_to(folder)) for path in files] == ["cluster/application.py"]
