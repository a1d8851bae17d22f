"""Spark's connectors to a store: URL schemes, and error messages of missing connectors."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import functions as F
from servers.fault_proxy import FaultProxy
from servers.s3 import let_spark_reach
from variants import others_in_soak

from hvd_estimators import list_prepared_data
from hvd_estimators.data import footers
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.exceptions import DependencyError, StoreError
from hvd_estimators.launch import SparkBackend
from hvd_estimators.launch.cluster.jobs import spread_over_tasks
from hvd_estimators.launch.task.run import hosts_without
from hvd_estimators.prepare.connectors import check_connector, spark_url
from hvd_estimators.prepare.dataframe import prepare_data
from hvd_estimators.store import DBFSLocalStore, HDFSStore, LocalStore, Store

pytestmark = [pytest.mark.spark, pytest.mark.once]


class ElsewhereStore(LocalStore):
    """Local store that reports other URLs to Spark."""

    places: tuple[str, ...] = ()

    def spark_urls(self, path: str) -> Sequence[str]:
        return [place + path for place in self.places]


def test_s3_urls_become_s3a_urls(s3a: Any, spark: Any) -> None:
    for url in (s3a.url, s3a.url.replace("s3:", "s3a:")):
        store = Store.create(f"{url}/connectors", storage_options=s3a.storage_options)
        path = store.get_train_data_path("7f")
        assert spark_url(spark, store, path) == path.replace("s3:", "s3a:")
        check_connector(spark, store)
        assert store.find(store.prefix_path) == []
    SparkBackend(num_proc=2).check_store(store)
    assert store.find(store.prefix_path) == []


def test_the_error_names_sparks_settings_for_s3(s3a: Any, spark: Any) -> None:
    store = Store.create(f"{s3a.url}/connectors", storage_options=s3a.storage_options)
    # A bucket for which this session has no keys, and a bucket that does not exist.
    for bucket in (s3a.new_bucket(), s3a.url.replace("bucket-", "absent-")):
        elsewhere = Store.create(bucket, storage_options=s3a.storage_options)
        with pytest.raises(StoreError, match=r"Spark cannot write.*spark\.hadoop\.fs\.s3a\.") as e:
            check_connector(spark, elsewhere)
        assert s3a.endpoint not in str(e.value)
    assert store.find(store.prefix_path) == []


def is_data(method: str, path: str) -> bool:
    return method in ("PUT", "POST") and ".parquet" in path


@pytest.mark.parametrize("validation", others_in_soak(None, 0.5))
def test_credentials_that_expire_while_spark_writes(s3a: Any, spark: Any, validation: Any) -> None:
    bucket = s3a.new_bucket()
    with FaultProxy(s3a.port) as proxy:
        options = s3a.options(endpoint=proxy.endpoint)
        let_spark_reach(spark, bucket, options)
        store = Store.create(f"{bucket}/store", storage_options=options)
        frame = spark.range(100).select("id", F.col("id").alias("x"))
        expired = proxy.fault("ExpiredToken", matches=is_data, times=None)
        told = r"(?s)Spark failed while it wrote .*token has expired.*valid credentials"
        prepared = functools.partial(
            prepare_data, 1, store, frame, ["id"], ["x"], validation=validation
        )
        with pytest.raises(StoreError, match=told), prepared():
            pass
        assert expired.happened > 0
        assert list_prepared_data(store) == []
        proxy.faults.clear()
        with prepared():
            assert [dataset.rows > 0 for dataset in list_prepared_data(store)] == [True]


def test_errors_of_rows_are_not_errors_of_the_store(store: Any, spark: Any) -> None:
    @F.udf("long")
    def fail(number: int) -> int:
        raise OSError(28, "No space left on device")

    frame = spark.range(9).select("id", fail("id").alias("x"))
    with pytest.raises(Exception, match="No space left on device") as raised:
        prepare_data(1, store, frame, ["id"], ["x"]).__enter__()
    assert not isinstance(raised.value, StoreError)


def test_hdfs_by_url_and_by_hadoop_configuration(
    hdfs: Any, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(f"{hdfs.url}/connectors")
    assert spark_url(spark, store, store.prefix_path) == store.prefix_path
    check_connector(spark, store)
    SparkBackend(num_proc=1).check_store(store)
    assert store.find(store.prefix_path) == []

    monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.conf_dir))
    path = hdfs.url.partition(f":{hdfs.port}")[2]
    by_configuration = HDFSStore(f"{path}/connectors")
    assert by_configuration.prefix_path == store.prefix_path
    store.write_text(f"{store.prefix_path}/file", "text")
    assert by_configuration.read(f"{store.prefix_path}/file") == b"text"
    store.delete(store.prefix_path)


def test_an_unreachable_name_node_is_reported(spark: Any, tmp_path: Path) -> None:
    store = ElsewhereStore(str(tmp_path))
    store.places = ("hdfs://127.0.0.1:1",)
    with pytest.raises(StoreError, match=r"Spark cannot write to 'hdfs://.*Connection refused"):
        check_connector(spark, store)


def test_the_error_names_the_package_of_a_missing_connector(spark: Any, tmp_path: Path) -> None:
    store = ElsewhereStore(str(tmp_path))
    store.places = ("gs://bucket",)
    with pytest.raises(
        DependencyError,
        match=r"no connector for the scheme 'gs'.*spark\.jars\.packages=com\.google",
    ):
        spark_url(spark, store, "/a")
    store.places = ("oss://bucket",)
    version = spark._jvm.org.apache.hadoop.util.VersionInfo.getVersion()
    # Before anything is written.
    prepared = prepare_data(1, store, spark.range(4), ["id"], ["id"])
    with pytest.raises(DependencyError, match=f"hadoop-aliyun:{version} "), prepared:
        pass
    assert list(tmp_path.iterdir()) == []
    store.places = ("strange://bucket", "file://")
    assert spark_url(spark, store, "/a") == "file:///a"


def test_different_places_for_spark_and_python_are_rejected(
    hdfs: Any, spark: Any, tmp_path: Path
) -> None:
    store = ElsewhereStore(str(tmp_path))
    store.places = (f"{hdfs.url}/elsewhere",)
    with pytest.raises(StoreError, match="Python does not see it at"):
        check_connector(spark, store)


def test_dbfs_paths_become_dbfs_or_file_urls(spark: Any, tmp_path: Path) -> None:
    store = DBFSLocalStore("dbfs:/store", mount=str(tmp_path))
    path = store.get_train_data_path("7f")
    found = spark_url(spark, store, path)
    assert found in ("dbfs:/store/intermediate_train_data.7f", f"file://{path}")


class BrokenStore(LocalStore):
    def exists(self, path: str) -> bool:
        raise StoreError("no credentials here, s3cr3t!")


def test_a_machine_that_cannot_reach_the_store_reports_why(tmp_path: Path) -> None:
    store = BrokenStore(str(tmp_path), storage_options={"secret": "s3cr3t!"})
    (batch,) = hosts_without(iter(()), store=store, path="/a")
    (problem,) = batch.to_pydict()["problem"]
    assert problem == "StoreError: no credentials here, ***"
    store = LocalStore(str(tmp_path))
    (batch,) = hosts_without(iter(()), store=store, path=f"{tmp_path}/absent")
    assert batch.to_pydict()["problem"] == ["does not see it"]
    (tmp_path / "there").touch()
    assert list(hosts_without(iter(()), store=store, path=f"{tmp_path}/there")) == []


def test_executors_read_the_footers_of_many_files(
    s3a: Any, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(f"{s3a.url}/footers", storage_options=s3a.storage_options)
    folder = f"{store.prefix_path}/many"

    def write(name: str, content: bytes) -> None:
        with store.open_atomic(f"{folder}/{name}.parquet") as file:
            file.write(content)

    for number in range(7):
        buffer = io.BytesIO()
        parquet.write_table(
            pa.table({"x": np.arange(number + 1.0), "y": ["a"] * (number + 1)}), buffer
        )
        write(f"day={number}/part", buffer.getvalue())
    read = functools.partial(
        *(read_manifest, store, folder, None, ["x", "day"]),
        spread=functools.partial(spread_over_tasks, description="Read"),
    )
    expected = read()
    monkeypatch.setattr(footers, "SPREAD_FILES", 7)
    monkeypatch.setattr(footers, "_FILES_PER_PART", 2)
    # Executors have the unchanged module.
    monkeypatch.setattr(footers, "read_tail", lambda *_: pytest.fail("The driver reads a footer."))

    assert read() == expected
    assert [group.rows for group in expected.train.row_groups] == [1, 2, 3, 4, 5, 6, 7]

    write("day=7/part", b"no Parquet")
    write("day=8/part", b"no Parquet")
    with pytest.raises(StoreError, match=r"day=7/part.parquet"):
        read()
