"""Spark Connect server on loopback, with a client in a separate process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark

from servers.driver import Application, application
from servers.processes import Server, answers, free_ports

__all__ = ["SLOTS", "connect_client", "why_no_connect"]

SLOTS = 3
_SPARK = Path(pyspark.__file__).parent
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


def why_no_connect() -> str:
    """Return the missing requirement of Spark Connect, or an empty string."""
    if not any(_SPARK.glob("jars/spark-connect_*.jar")):
        return "this PySpark comes without the server of Spark Connect"
    if importlib.util.find_spec("grpc_status") is None:
        return "grpcio-status, which pyspark[connect] brings, is missing"
    return ""


@contextlib.contextmanager
def connect_client(folder: Path) -> Iterator[Application]:
    """Run a server of ``local[3]``, and a client process with a session.

    Parameters
    ----------
    folder : Path
        Existing folder for their files.
    """
    (port,) = free_ports(1)
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    command = [
        *(str(_SPARK / "bin" / "spark-submit"), "--master", f"local[{SLOTS}]", "--class", _CLASS),
        *(part for item in settings.items() for part in ("--conf", "=".join(item))),
        "spark-internal",
    ]
    env = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SPARK_HOME": str(_SPARK),
    }
    server = Server("Spark Connect", command, folder / "server.txt", env=env)
    try:
        server.wait_until(lambda: answers(port), "ready")
        remote = {"spark.remote": f"sc://127.0.0.1:{port}"}
        with application(folder, remote, logs=server.tail) as made:
            yield made
    finally:
        server.kill()
