"""A master of Spark's standalone cluster that is restarted while ranks train."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.processes import Server, answers, free_ports

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.soak, pytest.mark.timeout(400)]

FIT = Path(__file__).with_name("fit_on_standalone.py")
REGISTERED = "Successfully registered with master"
SPARK_HOME = Path(importlib.util.find_spec("pyspark").origin).parent  # type: ignore


class Standalone:
    """A master and two workers with a core each, on loopback."""

    def __init__(self, folder: Path, recovers: bool) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        options = ""
        if recovers:
            options = (
                "-Dspark.deploy.recoveryMode=FILESYSTEM "
                f"-Dspark.deploy.recoveryDirectory={folder / 'recovery'}"
            )
        self._env = {"SPARK_MASTER_OPTS": options, "SPARK_LOCAL_IP": "127.0.0.1"}
        self._master = self._start_master()
        self._workers = [
            self._start(f"worker{number}", "worker.Worker", "--cores", "1", "--memory", "700m")
            for number in range(2)
        ]
        for worker in self._workers:
            worker.wait_until(lambda worker=worker: REGISTERED in worker.tail(), "registered")

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def restart_master(self) -> None:
        self._master.kill()
        assert not answers(self.port)
        self._master = self._start_master()

    def end(self) -> None:
        for server in (*self._workers, self._master):
            server.kill()

    def _start_master(self) -> Server:
        master = self._start(
            "master", "master.Master", "--host", "127.0.0.1", "--port", str(self.port)
        )
        master.wait_until(lambda: answers(self.port), "listening")
        return master

    def _start(self, name: str, program: str, *arguments: str) -> Server:
        command = [
            str(SPARK_HOME / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{program}",
            *("--webui-port", "0", *arguments),
        ]
        if program == "worker.Worker":
            command += ["--work-dir", str(self.folder / name), self.url]
        return Server(name, command, self.folder / f"{name}.log", env=self._env)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Standalone]:
    started = Standalone(tmp_path, recovers=request.param)
    try:
        yield started
    finally:
        started.end()


@pytest.mark.parametrize(
    ("cluster", "max_restarts", "expected"),
    [
        (True, 0, ["5 epochs, 0 restarts"]),
        (False, 0, ["WorkerFailedError: An executor", "Remote RPC client disassociated"]),
        (False, 1, ["SlotsError", "the cluster has none", "restarted without recovery"]),
    ],
    indirect=["cluster"],
    ids=["recovers", "forgets", "forgets, with restarts"],
)
def test_a_restarted_master_is_survived_or_named(
    cluster: Standalone, max_restarts: int, expected: list[str]
) -> None:
    store, log = cluster.folder / "store", cluster.folder / "driver.log"
    driver = Server(
        "driver",
        [sys.executable, str(FIT), cluster.url, str(store), str(max_restarts)],
        log,
        env={"HOROVOD_ELASTIC_TIMEOUT": "30", "PYSPARK_PYTHON": sys.executable},
    )
    try:
        driver.wait_until(lambda: "Epoch 1/5" in driver.tail(), "training", 200)
        cluster.restart_master()
        driver.wait_until(lambda: "THE FIT" in driver.tail(), "done", 200)
    finally:
        driver.kill()
    outcome = log.read_text().partition("THE FIT")[2]
    for text in expected:
        assert text in outcome
