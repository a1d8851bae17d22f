"""Java archives for the servers, from a folder or from Maven Central by way of Spark.

``HVD_TEST_JARS`` names the folder, which has a subfolder for each name below. If it is not set,
Spark resolves the same archives by their Maven coordinates, once for all test runs. If Maven is
unreachable, tests are skipped; ``HVD_TEST_SERVERS=required``, as in CI, makes them fail instead.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

_COORDINATES = {
    "hadoop": [
        "org.apache.hadoop:hadoop-client-minicluster:3.3.4",
        "org.apache.hadoop:hadoop-client-api:3.3.4",
        "org.apache.hadoop:hadoop-client-runtime:3.3.4",
        "org.bouncycastle:bcprov-jdk15on:1.60",
        "org.bouncycastle:bcpkix-jdk15on:1.60",
        "org.apache.logging.log4j:log4j-slf4j2-impl:2.20.0",
        "org.apache.logging.log4j:log4j-1.2-api:2.20.0",
        "org.glassfish.jaxb:jaxb-runtime:2.3.2",
        "javax.activation:activation:1.1.1",
    ],
    "s3a-spark-3.5": ["org.apache.hadoop:hadoop-aws:3.3.4"],
    "s3a-spark-4": ["org.apache.hadoop:hadoop-aws:3.5.0"],
}
_MAVEN = "repo1.maven.org"

_RESOLVE = """
import sys
from pyspark.sql import SparkSession
packages, cache = sys.argv[1:]
SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(
    "spark.jars.packages", packages).config("spark.jars.ivy", cache).getOrCreate().stop()
"""


def jars(name: str) -> list[str]:
    """Return the archives of one folder; skip or fail the test if they are unavailable."""
    found, reason = _find(name)
    if not found:
        unavailable(reason)
    return found


def s3a_jars() -> list[str]:
    """Return the archives of ``s3a://`` for this Spark; none if `HVD_TEST_JARS` is not set.

    The shared session does not wait for Maven.
    """
    return _find(s3a_folder())[0] if "HVD_TEST_JARS" in os.environ else []


def s3a_folder() -> str:
    """Return the name of the folder for the installed Spark."""
    import pyspark

    return "s3a-spark-4" if int(pyspark.__version__.split(".")[0]) >= 4 else "s3a-spark-3.5"


def unavailable(reason: str) -> NoReturn:
    """Skip a test without its server, or fail it if all servers are required."""
    if os.environ.get("HVD_TEST_SERVERS") == "required":
        pytest.fail(f"HVD_TEST_SERVERS=required, but {reason}")
    pytest.skip(reason)


@functools.cache
def _find(name: str) -> tuple[list[str], str]:
    folder = os.environ.get("HVD_TEST_JARS")
    if folder is not None:
        found = sorted(map(str, Path(folder, name).absolute().glob("*.jar")))
        return found, f"HVD_TEST_JARS={folder!r} holds no archives in {name!r}"
    try:
        socket.create_connection((_MAVEN, 443), timeout=5).close()
    except OSError as error:
        return [], (
            f"there are no Java archives: HVD_TEST_JARS is not set, and {_MAVEN} cannot be "
            f"reached ({error})"
        )
    return _resolved(name)


def _resolved(name: str) -> tuple[list[str], str]:
    cache = os.environ.get("HVD_ESTIMATORS_CACHE") or "~/.cache/hvd_estimators"
    ivy = Path(cache).expanduser() / "test-jars" / name
    if not (ivy / "complete").exists():
        done = subprocess.run(
            [sys.executable, "-c", _RESOLVE, ",".join(_COORDINATES[name]), str(ivy)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return [], f"Maven does not give {', '.join(_COORDINATES[name])}:\n{done.stderr}"
        (ivy / "complete").touch()
    return sorted(map(str, (ivy / "jars").glob("*.jar"))), f"there are no archives in {ivy}"
