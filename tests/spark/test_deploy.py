"""Recipes of ``deploy/``, run unchanged in a clone, on machines that lack the environment."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import two_hosts
from newcomer import ROOT, Newcomer, output_of
from recipe_program import result_of
from servers.hdfs import Hdfs
from servers.processes import Server, answers, free_ports
from servers.yarn import Yarn
from two_hosts import Cluster, Host

pytestmark = [*(pytest.mark.soak, pytest.mark.spark, pytest.mark.once), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def spark_3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """Pack an environment with torch, PySpark 3.5 and the client of HDFS."""
    folder = tmp_path_factory.mktemp("spark-3") / "clone"
    yield Newcomer.in_clone(folder, "-c", "constraints/petastorm.txt", ".[torch,hdfs]")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def spark_4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """Pack an environment with torch, PySpark 4 and the client of Spark Connect."""
    folder = tmp_path_factory.mktemp("spark-4") / "clone"
    yield Newcomer.in_clone(folder, "-c", "constraints/modern.txt", ".[torch,connect]")
    shutil.rmtree(folder, ignore_errors=True)


def test_the_machines_own_python_lacks_the_environment(spark_3: Newcomer) -> None:
    search = "from importlib.util import find_spec as f; print(f('torch'), f('hvd_estimators'))"
    assert spark_3.run(spark_3.python, "-I", "-c", search).strip() == "None None"


@pytest.fixture(scope="module")
def user_of_yarn(
    spark_3: Newcomer, yarn: Yarn, tmp_path_factory: pytest.TempPathFactory
) -> Newcomer:
    """Return a newcomer whose machine has the cluster's configuration."""
    conf = tmp_path_factory.mktemp("conf")
    settings = f"spark.yarn.jars local:{spark_3.spark_home}/jars/*\nspark.ui.enabled false\n"
    (conf / "spark-defaults.conf").write_text(settings)
    return spark_3.having(
        HADOOP_CONF_DIR=str(yarn.conf_dir), SPARK_CONF_DIR=str(conf), SPARK_LOCAL_IP=yarn.host
    )


def is_in_container(place: list[str], yarn: Yarn) -> bool:
    """Return whether a package lies in a container's link to the unpacked archive."""
    container = Path(place[1]).parents[4]
    return (
        container.is_relative_to(yarn.local_dir)
        and container.name.startswith("container_")
        and Path(place[1]).relative_to(container).parts[0] == "environment"
    )


def test_yarn_in_cluster_mode_with_the_archive_in_hdfs(
    user_of_yarn: Newcomer, yarn: Yarn, hdfs: Hdfs
) -> None:
    environments = f"{hdfs.url}/environments"
    hdfs.shell("-mkdir", "-p", environments)
    hdfs.shell("-put", str(user_of_yarn.archive), environments)
    before = set(yarn.log_dir.glob("*"))

    user_of_yarn.run(
        *("sh", "deploy/yarn/cluster_mode.sh", "deploy/train.py", "hdfs:///tests/cluster-mode"),
        ENVIRONMENT=f"{environments}/environment.tar.gz",
    )

    (logs,) = set(yarn.log_dir.glob("*")) - before
    found = result_of("".join(file.read_text() for file in logs.glob("*/stdout")))
    places = [found["driver"], *found["ranks"]]
    assert [is_in_container(place, yarn) for place in places] == [True] * 3, places
    assert "cluster-mode" in hdfs.shell("-ls", hdfs.url)


def test_yarn_in_client_mode_with_the_archive_of_the_users_machine(
    user_of_yarn: Newcomer, yarn: Yarn, hdfs: Hdfs
) -> None:
    found = result_of(
        user_of_yarn.run(
            *("sh", "deploy/yarn/client_mode.sh", "deploy/train.py", "hdfs:///tests/client-mode")
        )
    )

    assert Path(found["driver"][1]).is_relative_to(user_of_yarn.environment)
    assert [is_in_container(place, yarn) for place in found["ranks"]] == [True] * 2, found
    assert "client-mode" in hdfs.shell("-ls", hdfs.url)


def open_ports() -> list[tuple[int, int]]:
    """Return the ranges of ports in the page's table."""
    page = (ROOT / "docs" / "deploy" / "standalone.rst").read_text(encoding="utf-8")
    rows = re.findall(r"^   \* - (\d+)(?: to (\d+))?$", page, re.MULTILINE)
    return [(int(first), int(last or first)) for first, last in rows]


def close_other_ports(host: Host) -> None:
    """Let a host connect only to open ports of the others."""
    # The kernel takes no range that ends with 65535.
    ends = [0, *(port for ports in open_ports() for port in ports), 2**16 - 1]
    for last_open, next_open in zip(ends[::2], ends[1::2], strict=True):
        if last_open + 1 < next_open:
            host.run(
                *("ip", "rule", "add", "to", f"{two_hosts.NETWORK}.0/24", "ipproto", "tcp"),
                *("dport", f"{last_open + 1}-{next_open - 1}", "prohibit"),
            )


_CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 5)
    except OSError as error:
        print(port, type(error).__name__)
"""


def errors_of_connections(newcomer: Newcomer, address: str, *ports: int) -> list[str]:
    """Return each port's error, where no program listens."""
    command = [newcomer.python, "-I", "-c", _CONNECT, address, *map(str, ports)]
    return newcomer.run(*command).splitlines()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Cluster]:
    """Make two hosts with separate ``/opt``, without this checkout, with few open ports."""
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    with two_hosts.only_hosts() as made:
        for host in (made.first, made.second):
            own = tmp_path / host.address
            for name in ("upper", "work", "empty"):
                (own / name).mkdir(parents=True)
            layers = f"lowerdir=/opt,upperdir={own}/upper,workdir={own}/work"
            host.run("mount", "-t", "overlay", "overlay", "-o", layers, "/opt")
            host.run("mount", "--bind", str(own / "empty"), str(ROOT))
            close_other_ports(host)
            # The recipe's environment has torch's Gloo, which takes the interface's first address.
            host.run("ip", "address", "delete", host.alone, "dev", "eth0")
        yield made


def test_standalone_on_two_hosts_with_the_open_ports_of_the_page(
    spark_3: Newcomer, hosts: Cluster, tmp_path: Path
) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    for name in ("spark-env.sh", "spark-defaults.conf"):
        shutil.copy(spark_3.folder / "deploy" / "standalone" / name, conf)
    first, second = (
        spark_3.having(
            inside=host.inside,
            HOST=host.address,
            MASTER=hosts.first.address,
            SPARK_CONF_DIR=str(conf),
            SPARK_LOCAL_IP=host.address,
            SPARK_WORKER_CORES="1",
            SPARK_WORKER_DIR=str(tmp_path / f"work-{host.address}"),
        )
        for host in (hosts.first, hosts.second)
    )
    recipe = "deploy/standalone"
    for machine in (first, second):
        machine.run("sh", f"{recipe}/ephemeral_ports.sh")
    # A port that is open answers at once that no program listens.
    assert errors_of_connections(first, hosts.second.address, 7078, 7079, 39999, 40000) == [
        *("7078 ConnectionRefusedError", "7079 PermissionError"),
        *("39999 PermissionError", "40000 ConnectionRefusedError"),
    ]
    for machine in (first, second):
        machine.run("sh", f"{recipe}/install_environment.sh", "environment.tar.gz")

    logs = [tmp_path / name for name in ("master.log", "worker-1.log", "worker-2.log")]
    servers: list[Server] = []
    try:
        servers.append(first.serve(logs[0], "sh", f"{recipe}/start_master.sh"))
        servers[0].wait_until(lambda: "New state: ALIVE" in logs[0].read_text(), "ready", 300)
        for machine, log in zip((first, second), logs[1:], strict=True):
            servers.append(machine.serve(log, "sh", f"{recipe}/start_worker.sh"))

        def have_registered() -> bool:
            return all("Successfully registered" in log.read_text() for log in logs[1:])

        servers[2].wait_until(have_registered, "registered", 300)
        store = (tmp_path / "store").as_uri()
        found = result_of(first.run("sh", f"{recipe}/submit.sh", "deploy/train.py", store))
    finally:
        for server in servers:
            server.kill()

    assert sorted(host for host, _ in found["ranks"]) == ["host1", "host2"]
    places = [found["driver"], *found["ranks"]]
    assert all(place.startswith("/opt/environment/lib/") for _, place in places), places
    assert not os.path.exists("/opt/environment")


def test_a_connect_server_with_two_executors_serves_two_users_at_once(
    spark_4: Newcomer, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    user = spark_4.having(PORT=str(port), SPARK_LOCAL_IP="127.0.0.1")
    log = tmp_path / "server.log"
    server = user.serve(
        *(log, "sh", "deploy/connect/server.sh", "--conf", "spark.ui.enabled=false"),
        MASTER="local-cluster[2,2,1024]",
        HOST="127.0.0.1",
    )
    try:
        server.wait_until(lambda: answers(port), "ready", seconds=300)
        programs = [
            user.start(
                *("sh", "deploy/connect/client.sh", "deploy/train.py"),
                (tmp_path / name).as_uri(),
                SERVER="127.0.0.1",
                USER_ID=name,
            )
            for name in ("ann", "ben")
        ]
        try:
            results = [result_of(output_of(program)) for program in programs]
        except AssertionError as error:
            raise AssertionError(f"{error}\n== the server\n{server.tail()}") from None
    finally:
        server.kill()

    executors = set()
    for found in results:
        assert Path(found["driver"][1]).is_relative_to(user.environment)
        for _, package in found["ranks"]:
            # local-cluster keeps the folders of its executors there.
            place = Path(os.path.normpath(package)).relative_to(spark_4.spark_home / "work")
            application, executor, *inside = place.parts
            assert application.startswith("app-")
            assert inside[0] == "environment"
            executors.add(executor)
    assert len(executors) == 2
