"""Fixtures of servers, which start on first use and end with the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.connect import connect_client, why_no_connect
from servers.driver import Application
from servers.gpus import gpu_application
from servers.hdfs import Hdfs
from servers.jars import jars, s3a_folder
from servers.s3 import S3
from servers.yarn import Yarn


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """Start a NameNode and a DataNode."""
    cluster = Hdfs(tmp_path_factory.mktemp("hdfs"), jars("hadoop"))
    cluster.start()
    yield cluster
    _forget_prepared_data()
    cluster.stop()


@pytest.fixture(scope="module")
def hdfs_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """Start a NameNode and two DataNodes, each with all blocks."""
    cluster = Hdfs(tmp_path_factory.mktemp("hdfs_of_two"), jars("hadoop"), datanodes=2)
    cluster.start()
    yield cluster
    _forget_prepared_data()
    cluster.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """Start an S3 server for Python; tests that need it in Spark use `s3a` as well."""
    server = S3(tmp_path_factory.mktemp("s3"))
    server.start_process()
    yield server
    _forget_prepared_data()
    server.end_process()


def _forget_prepared_data() -> None:
    """Delete data cached for the next fit, before the server that holds it ends."""
    if "hvd_estimators.prepare.datasets" in sys.modules:
        sys.modules["hvd_estimators.prepare.datasets"].clear_training_cache()


@pytest.fixture(scope="session")
def s3a(s3: S3, spark: object) -> S3:
    """Let the session's Spark reach the S3 server by ``s3a://``."""
    jars(s3a_folder())
    s3.configure(spark)
    return s3


@pytest.fixture(scope="session")
def dbfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that replaces ``/dbfs``."""
    folder = tmp_path_factory.mktemp("mount") / "dbfs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def dbfs_on_spark(dbfs: Path, spark: Any) -> Path:
    """Let the session's Spark reach the folder by ``dbfs:/``, like on Databricks."""
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    overloaded = "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme"
    configuration.set("fs.dbfs.impl", overloaded)
    configuration.set("fs.viewfs.mounttable.default.linkFallback", dbfs.as_uri())
    return dbfs


@pytest.fixture(scope="session")
def gpu_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Start an application with two executors of two pretended GPUs each."""
    with gpu_application(tmp_path_factory.mktemp("gpus")) as made:
        yield made


@pytest.fixture(scope="session")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Start a client of a Spark Connect server with three task slots."""
    if reason := why_no_connect():
        pytest.skip(reason)
    with connect_client(tmp_path_factory.mktemp("connect")) as made:
        yield made


@pytest.fixture(scope="session")
def yarn(tmp_path_factory: pytest.TempPathFactory, hdfs: Hdfs) -> Iterator[Yarn]:
    """Start a ResourceManager and a NodeManager."""
    cluster = Yarn(tmp_path_factory.mktemp("yarn"), jars("hadoop"), hdfs)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def yarn_application(tmp_path_factory: pytest.TempPathFactory, yarn: Yarn) -> Iterator[Application]:
    """Start an application with two containers of one task slot each."""
    with yarn.application(tmp_path_factory.mktemp("application")) as made:
        yield made
