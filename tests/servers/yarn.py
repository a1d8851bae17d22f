"""Real YARN on loopback: a ResourceManager and a NodeManager beside the tests' HDFS."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pyspark

from servers.driver import Application, application
from servers.hdfs import Hdfs, java_command, write_settings
from servers.processes import Server, free_ports

_SERVER = "org.apache.hadoop.yarn.server"
# Guice generates classes at run time, which Java 17 allows only with this option.
_JAVA = ["--add-opens", "java.base/java.lang=ALL-UNNAMED"]


class Yarn:
    """Cluster with a single machine of four cores and 8 GB.

    Parameters
    ----------
    folder : Path
        Folder for the servers' files.
    jars : sequence of str
        Hadoop's Java archives.
    hdfs : Hdfs
        Filesystem for the files of containers.

    Attributes
    ----------
    conf_dir : Path
        Hadoop configuration that names both.
    local_dir, log_dir : Path
        Folders of the machine for what containers run, and for their output.
    """

    def __init__(self, folder: Path, jars: Sequence[str], hdfs: Hdfs) -> None:
        self._folder, self._jars = folder, jars
        self.host = "127.0.0.1"
        self.conf_dir = folder / "conf"
        self.local_dir, self.log_dir = folder / "local", folder / "logs"
        shutil.copytree(hdfs.conf_dir, self.conf_dir)
        self._web_port, *ports = free_ports(8)
        addresses = [
            *("resourcemanager.address", "resourcemanager.scheduler.address"),
            *("resourcemanager.resource-tracker.address", "resourcemanager.admin.address"),
            *("nodemanager.address", "nodemanager.localizer.address"),
            "nodemanager.webapp.address",
        ]
        settings = {
            "resourcemanager.hostname": self.host,
            "nodemanager.hostname": self.host,
            "resourcemanager.webapp.address": f"{self.host}:{self._web_port}",
            **{name: f"{self.host}:{port}" for name, port in zip(addresses, ports, strict=True)},
            "nodemanager.local-dirs": str(self.local_dir),
            "nodemanager.log-dirs": str(self.log_dir),
            "nodemanager.resource.memory-mb": "8192",
            "nodemanager.resource.cpu-vcores": "4",
            "nodemanager.vmem-check-enabled": "false",
            "nodemanager.pmem-check-enabled": "false",
            "nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "99",
            "nodemanager.env-whitelist": "JAVA_HOME,PATH",
            # An application's master does not wait for a killed ResourceManager.
            "resourcemanager.connect.max-wait.ms": "4000",
            "resourcemanager.connect.retry-interval.ms": "500",
            "nodemanager.resourcemanager.connect.max-wait.ms": "60000",
            # Containers are killed soon after they are asked to end.
            "nodemanager.sleep-delay-before-sigkill.ms": "100",
            "scheduler.minimum-allocation-mb": "128",
        }
        site = {f"yarn.{name}": value for name, value in settings.items()}
        write_settings(self.conf_dir / "yarn-site.xml", site)
        scheduler = {
            "root.queues": "default",
            "root.default.capacity": "100",
            "maximum-am-resource-percent": "0.9",
            "resource-calculator": (
                "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator"
            ),
        }
        queues = {f"yarn.scheduler.capacity.{name}": value for name, value in scheduler.items()}
        write_settings(self.conf_dir / "capacity-scheduler.xml", queues)

    def start(self) -> None:
        """Start both servers and wait until the machine accepts containers."""
        self._servers: list[Server] = []
        try:
            for name in ("resourcemanager.ResourceManager", "nodemanager.NodeManager"):
                command = java_command(self.conf_dir, self._jars, *_JAVA, f"{_SERVER}.{name}")
                log = self._folder / f"{name.partition('.')[2]}.txt"
                self._servers.append(Server(name, command, log))
            self._servers[0].wait_until(self._has_a_node, "ready")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End both servers and remaining containers."""
        for server in self._servers:
            server.kill()
        # Each container has a separate session. Most containers have ended with their application.
        for container in self.containers():
            with contextlib.suppress(psutil.NoSuchProcess):
                container.kill()

    def containers(self) -> list[psutil.Process]:
        """Return the processes in containers."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                own = process.environ()
                if "CONTAINER_ID" in own and str(self._folder) in own.get("LOCAL_DIRS", ""):
                    found.append(process)
        return found

    @contextlib.contextmanager
    def application(self, folder: Path, **conf: str) -> Iterator[Application]:
        """Run an application in client mode with two containers of one task slot each.

        Parameters
        ----------
        folder : Path
            Existing folder for its files.
        **conf
            Settings that override the defaults; words of a name are joined by ``__``.
        """
        settings = {
            "spark.master": "yarn",
            "spark.driver.host": self.host,
            "spark.driver.bindAddress": self.host,
            "spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*",
            "spark.pyspark.python": sys.executable,
            "spark.executor.instances": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.yarn.am.memory": "384m",
            **{name.replace("__", "."): value for name, value in conf.items()},
        }
        if "PYTHONPATH" in os.environ:
            settings["spark.executorEnv.PYTHONPATH"] = os.environ["PYTHONPATH"]
        env = {"HADOOP_CONF_DIR": str(self.conf_dir), "SPARK_LOCAL_IP": self.host}
        with application(folder, settings, env, logs=lambda: self._logs(folder)) as made:
            yield made
        deadline = time.monotonic() + 30
        while left := self.containers():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def _logs(self, folder: Path) -> str:
        """Return the ends of the driver's log and of each container's."""
        files = [folder / "driver.log", *sorted(self.log_dir.glob("*/*/std*"))]
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def _has_a_node(self) -> bool:
        url = f"http://{self.host}:{self._web_port}/ws/v1/cluster/metrics"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                metrics = json.load(answer)
        except (OSError, ValueError):
            return False
        return bool(metrics.get("activeNodes") == 1)
