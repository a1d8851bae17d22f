"""Stores on Databricks: paths on DBFS and in volumes, and their Spark URLs."""

import contextlib
import os
import pickle

import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store import DBFSLocalStore, LocalStore, Store, VolumesStore

FORMS = ["dbfs:/a/b", "/dbfs/a/b", "file:///dbfs/a/b", "file:/dbfs/a/b"]


@pytest.fixture
def databricks(monkeypatch):
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")


@pytest.fixture
def off_databricks(monkeypatch):
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)


@pytest.mark.parametrize("path", FORMS)
def test_all_forms_of_a_dbfs_path_are_equivalent(databricks, path):
    store = Store.create(path)

    assert type(store) is DBFSLocalStore
    assert store.prefix_path == "/dbfs/a/b"
    assert store.local_path(store.prefix_path) == "/dbfs/a/b"
    assert store.spark_url(store.get_train_data_path()) == "dbfs:/a/b/intermediate_train_data"
    assert DBFSLocalStore.matches_dbfs(path)


@pytest.mark.parametrize(
    "path", ["dbfs://a/b", "/dbfsx/a", "/a/dbfs/b", "file:///a", "s3://b/a", "dbfs:/Volumes/a/b"]
)
def test_other_paths_are_not_on_dbfs(path):
    assert not DBFSLocalStore.matches_dbfs(path)
    with pytest.raises(ParamError, match="expected a path on DBFS"):
        DBFSLocalStore(path)


def test_dbfs_is_used_only_on_databricks(off_databricks):
    assert type(Store.create("/dbfs/a")) is type(Store.create("file:/dbfs/a")) is LocalStore
    assert type(Store.create("/Volumes/a/b/c")) is LocalStore
    for path in ("dbfs:/a", "dbfs://a"):
        with pytest.raises(ParamError, match="no store for the scheme 'dbfs'"):
            Store.create(path)


def test_local_and_volume_paths_on_databricks(databricks):
    assert type(Store.create("/local_disk0/a")) is LocalStore
    with pytest.raises(ParamError, match="no store for the scheme 'dbfs'"):
        Store.create("dbfs://a")
    for path in ("/Volumes/main/default/volume/a", "dbfs:/Volumes/main/default/volume/a"):
        store = Store.create(path)
        assert type(store) is VolumesStore
        assert store.prefix_path == "/Volumes/main/default/volume/a"
        assert store.spark_url(store.prefix_path) == "dbfs:/Volumes/main/default/volume/a"
        with pytest.raises(ParamError, match="found 'dbfs:/a'"):
            store.get_full_path("dbfs:/a")


def test_explicit_paths():
    store = DBFSLocalStore("dbfs:/a", train_path="/dbfs/b/train", runs_path="file:///dbfs/b/runs")
    assert store.get_train_data_path("7f") == "/dbfs/b/train.7f"
    assert store.get_run_path("r") == "/dbfs/b/runs/r"
    with pytest.raises(ParamError, match="expected a path on DBFS, found '/b'"):
        DBFSLocalStore("dbfs:/a", train_path="/b")


def test_files_are_written_sequentially_on_any_mount(tmp_path, monkeypatch):
    store = DBFSLocalStore("dbfs:/a", mount=str(tmp_path))
    path = f"{store.prefix_path}/runs/model"
    assert path == f"{tmp_path}/a/runs/model"
    assert store.spark_urls(path) == ("dbfs:/a/runs/model", f"file://{path}")

    with store.open_atomic(path) as file:
        file.write(b"12345")
        file.seek(0)  # as the writer of a zip archive does
        file.write(b"2")
        assert os.listdir(tmp_path) == []
    there = pickle.loads(pickle.dumps(store))
    assert there.read(path) == b"22345"
    with contextlib.suppress(ValueError), store.open_atomic(path) as file:
        file.write(b"half")
        raise ValueError
    assert store.find(store.prefix_path) == [path]
    assert store.read(path) == b"22345"
    # Writers that append to files must use another folder.
    assert store.local_path(path) == path
    assert store.writable_path(path) is None
