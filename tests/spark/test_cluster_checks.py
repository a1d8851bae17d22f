"""The doctor on two hosts with faults: each one is named with its host and remedy.

The second host's Python is another one by a script that looks at the host's name. Its missing
packages are really missing, and its store and network are really apart. Its clock and the version
of its Python are pretended, by a ``sitecustomize`` module in its Python processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import two_hosts
from lean_environment import lean_environment
from servers.driver import Application
from two_hosts import Cluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

# Imports of the others take long.
SLOW = ("tensorflow", "keras", "lightning", "pytorch_lightning", "petastorm", "horovod")

CLOCK = """
import time
now = time.time
time.time = lambda: now() + 3600
"""

OTHER_PYTHON = """
import collections, sys
version = collections.namedtuple("version_info", "major minor micro releaselevel serial")
sys.version_info = version(3, 7, 1, "final", 0)
"""

PYTHON = """#!/bin/sh
unset PYTHONPATH
case "$FAULTS $(hostname)" in
  "clock host2") PYTHONPATH={folder}/clock exec {folder}/lean/bin/python3 "$@" ;;
  "package host2") exec {folder}/without-package/bin/python3 "$@" ;;
  "python host2") PYTHONPATH={folder}/python exec {folder}/lean/bin/python3 "$@" ;;
esac
exec {folder}/lean/bin/python3 "$@"
"""

# Ports that the system assigns, such as those of ranks, and Spark's own, which stay open.
ASSIGNED, SPARK = "32768-60999", "7000-7999"
PORTS = {
    "spark.driver.port": "7100",
    "spark.driver.blockManager.port": "7200",
    "spark.blockManager.port": "7300",
}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    lean_environment(folder / "lean", SLOW)
    lean_environment(folder / "without-package", SLOW)
    for repository in (folder / "without-package").glob("lib/*/site-packages/repository.pth"):
        repository.unlink()
    for name, source in {"clock": CLOCK, "python": OTHER_PYTHON}.items():
        (folder / name).mkdir()
        (folder / name / "sitecustomize.py").write_text(source)
    python = folder / "python3"
    python.write_text(PYTHON.format(folder=folder))
    python.chmod(0o755)
    return folder


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    with two_hosts.hosts_and_cluster() as made, made.driver(**PORTS):
        yield made


def check(python: str, faults: str, store: str) -> tuple[bool, list[dict[str, str]]]:
    """Return whether the cluster is healthy, and the rows. Runs on the driver."""
    from pyspark.sql import SparkSession

    from hvd_estimators.commands.cluster_doctor import check_cluster

    spark = SparkSession.getActiveSession()
    assert spark is not None
    spark.sparkContext.pythonExec = python
    spark.sparkContext.environment["FAULTS"] = faults
    with contextlib.redirect_stdout(io.StringIO()) as output:
        # torch's Gloo takes the first address of eth0, which leads nowhere.
        is_healthy = check_cluster(spark, store, nics="six0", as_json=True)
    return is_healthy, json.loads(output.getvalue())


@contextlib.contextmanager
def blocked(cluster: Cluster) -> Iterator[None]:
    """Block the ports that the system assigns between the two hosts."""
    rules = [("-4", cluster.second.address), ("-6", cluster.second.address6)]
    rules.append(("-6", cluster.second.only6))
    for family, address in rules:
        given = ["ip", family, "rule", "add"]
        spark = [*given, "pref", "10", "to", address, "ipproto", "tcp", "sport", SPARK]
        cluster.first.run(*spark, "lookup", "main")
        assigned = ["ipproto", "tcp", "dport", ASSIGNED]
        cluster.first.run(*given, "pref", "20", "to", address, *assigned, "blackhole")
    yield
    for family, _ in rules:
        for preference in ("10", "20"):
            cluster.first.run("ip", family, "rule", "del", "pref", preference)


@contextlib.contextmanager
def hidden(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Hide a folder from the second host behind an empty one of its own."""
    cluster.second.run("mount", "-t", "tmpfs", "none", str(folder))
    yield
    cluster.second.run("umount", str(folder))


@pytest.mark.soak
def test_each_fault_of_a_host_is_named_with_its_remedy(
    cluster: Cluster, environments: Path, tmp_path: Path
) -> None:
    python, store = str(environments / "python3"), tmp_path / "store"
    store.mkdir()

    def checked(faults: str) -> tuple[bool, dict[tuple[str, str], dict[str, str]]]:
        is_healthy, rows = cluster.run(check, python, faults, str(store), timeout=500)
        problems = [row for row in rows if row["status"] == "problem"]
        found = {(row["host"].partition(" ")[0], row["component"]): row for row in problems}
        return is_healthy, found

    with hidden(cluster, store):
        is_healthy, found = checked("clock")
    assert not is_healthy
    assert set(found) == {
        ("driver", "Store"),
        ("host2", "Clock"),
    }, found
    row: dict[str, Any] = found["driver", "Store"]
    assert "executors on host2 do not see what the driver writes" in row["found"]
    assert "storage that all machines share" in row["remedy"]
    row = found["host2", "Clock"]
    assert row["found"].startswith(("at least 3,5", "at least 3,600")), row
    assert "timedatectl" in row["remedy"]

    with blocked(cluster):
        is_healthy, found = checked("")
    assert not is_healthy
    assert set(found) == {("driver", "Launch")}
    text = found["driver", "Launch"]["found"]
    assert "host1" in text
    assert "host2" in text
    assert "nics" in text

    is_healthy, found = checked("package")
    assert not is_healthy
    assert set(found) == {("driver", "Launch")}
    assert "No module named 'hvd_estimators'" in found["driver", "Launch"]["found"]

    is_healthy, found = checked("python")
    assert not is_healthy
    assert set(found) == {("driver", "Launch")}
    assert "another version than the driver" in found["driver", "Launch"]["found"]

    is_healthy, found = checked("")
    assert is_healthy, found
    assert not found
    assert not list(store.iterdir())


@pytest.mark.soak
def test_the_command_checks_a_session_of_its_own_and_says_how_it_went(
    environments: Path, tmp_path: Path
) -> None:
    python = str(environments / "lean" / "bin" / "python3")
    command = [python, "-m", "hvd_estimators", "doctor", "--cluster", "--master", "local[2]"]
    command += ["--conf", "spark.ui.enabled=false", "--store", str(tmp_path / "store")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        env = {**variables, "PYSPARK_PYTHON": python}
        given = {"capture_output": True, "text": True, "timeout": 500, "check": False}
        return subprocess.run([*command, *more], env=env, **given)

    healthy = run()
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    driver, host = healthy.stdout.strip().split("\n\n")
    assert driver.startswith("driver\nPython ")
    assert f"{socket.gethostname()} (" in host
    assert "(ranks 0 to 1)" in host
    assert re.search(r"\nAllreduce +ok +2 processes in ", driver)
    assert re.search(r"\nStore +ok +all hosts read ", driver)

    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("a file")
    unusable = run("--json", "--num-proc", "1")
    assert unusable.returncode == 1, unusable.stdout + unusable.stderr
    problems = [row for row in json.loads(unusable.stdout) if row["status"] == "problem"]
    assert {row["component"] for row in problems} == {"Store"}


@pytest.mark.soak
def test_over_spark_connect_the_host_is_checked_too(connect: Application, tmp_path: Path) -> None:
    def check_slots(store: str) -> tuple[bool, list[dict[str, str]]]:
        from hvd_estimators.commands.cluster_doctor import check_cluster

        with contextlib.redirect_stdout(io.StringIO()) as output:
            is_healthy = check_cluster(store=store, as_json=True)
        return is_healthy, json.loads(output.getvalue())

    is_healthy, rows = connect.run(check_slots, str(tmp_path / "store"), timeout=500)

    assert is_healthy, rows
    assert {row["host"].rpartition(" (")[2] for row in rows} == {"driver", "ranks 0 to 2)"}
