"""Stores on any filesystem of fsspec's, and which class of stores serves a scheme."""

import pickle
import sys
import types

import fsspec
import pytest

from hvd_estimators.exceptions import DependencyError, ParamError, StoreError
from hvd_estimators.store import FilesystemStore, LocalStore, RunPaths, Store, register_store
from hvd_estimators.store.registry import (
    _stores,
    registered_schemes,
    scheme_of,
    store_class,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr("hvd_estimators.store.registry._stores", dict(_stores))


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    root = tmp_path.relative_to("/")
    yield FilesystemStore(f"{request.param}://{tmp_path}/store")
    fs = fsspec.filesystem("memory")
    if fs.exists(f"/{root}"):
        fs.rm(f"/{root}", recursive=True)


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        ("/data", ""),
        ("data", ""),
        ("data/a:b", ""),
        ("C:/data", ""),
        ("file:///data", "file"),
        ("file:/data", "file"),
        ("dbfs:/data", "dbfs"),
        ("S3://bucket/data", "s3"),
        ("git+ssh://host/data", "git+ssh"),
    ],
)
def test_the_scheme_of_a_path(path, scheme):
    assert scheme_of(path) == scheme


def test_the_store_of_a_scheme_and_what_is_said_where_there_is_none():
    assert store_class("/data") is store_class("file:///data") is LocalStore
    assert type(Store.create("memory://data")) is FilesystemStore

    with pytest.raises(ParamError, match=r"scheme 'nothing'.*one of: file, memory\."):
        Store.create("nothing://a")


def test_a_scheme_can_be_added_as_a_class_a_name_or_an_entry_point(monkeypatch):
    class Mine(FilesystemStore):
        pass

    register_store("Memory", Mine)
    assert type(Store.create("memory://data")) is Mine

    module = types.ModuleType("stores_of_somebody")
    module.Theirs = Mine
    monkeypatch.setitem(sys.modules, "stores_of_somebody", module)
    register_store("theirs", "stores_of_somebody:Theirs")
    assert store_class("theirs://data") is Mine

    entry = types.SimpleNamespace(name="installed", load=lambda: Mine)
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: [entry] if group == "hvd_estimators.stores" else [],
    )
    assert registered_schemes() == ["file", "installed", "memory", "theirs"]
    assert store_class("installed://data") is Mine


def test_paths_keep_their_scheme():
    store = FilesystemStore("memory://data/", val_path="memory:///elsewhere/val")

    assert store.prefix_path == "memory:///data"
    assert store.get_train_data_path("7f") == "memory:///data/intermediate_train_data.7f"
    assert store.get_val_data_path() == "memory:///elsewhere/val"
    assert store.run_paths("r1") == RunPaths(
        "r1",
        "memory:///data/runs/r1",
        "memory:///data/runs/r1/checkpoints",
        "memory:///data/runs/r1/logs",
    )
    assert store.local_path(store.prefix_path) is None
    assert FilesystemStore("file:///data").local_path("file:///data/a") == "/data/a"


def test_files_are_written_listed_read_and_deleted(store):
    prefix = store.prefix_path
    store.write_text(f"{prefix}/runs/r1/checkpoints/b.ckpt", "größe")
    store.write_text(f"{prefix}/runs/r1/checkpoints/a.ckpt", "")

    assert store.read(f"{prefix}/runs/r1/checkpoints/b.ckpt") == "größe".encode()
    checkpoints = [f"{prefix}/runs/r1/checkpoints/{name}.ckpt" for name in "ab"]
    assert store.find(prefix) == store.get_checkpoints("r1") == checkpoints
    assert store.find(checkpoints[0]) == checkpoints[:1]
    assert store.names(f"{prefix}/runs") == ["r1"]
    assert store.names(f"{prefix}/absent") == store.find(f"{prefix}/absent") == []

    store.delete(f"{prefix}/runs")
    store.delete(f"{prefix}/runs")
    assert not store.exists(f"{prefix}/runs/r1")
    with pytest.raises(StoreError, match="holds no file"):
        store.read(checkpoints[0])


def test_names_that_look_like_patterns_are_names(store):
    for name in ("a?c", "abc", "[a]"):
        store.write_text(f"{store.prefix_path}/{name}", name)
    store.delete(f"{store.prefix_path}/a?c")
    assert store.names(store.prefix_path) == ["[a]", "abc"]
    with pytest.raises(ParamError, match="for patterns"):
        FilesystemStore(f"{store.prefix_path}/data[1]")


def write_half(store, path, error):
    with store.open_atomic(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_keeps_the_file_that_was_there(store, error):
    path = f"{store.prefix_path}/model"
    with pytest.raises(error):
        write_half(store, path, error)
    assert not store.exists(path)

    store.write_text(path, "old")
    with pytest.raises(error):
        write_half(store, path, error)
    assert store.read(path) == b"old"
    assert store.find(store.prefix_path) == [path]

    store.write_text(path, "new")
    assert store.read(path) == b"new"


def test_memory_that_no_other_process_sees_is_refused_for_spark_and_training(store):
    if store.prefix_path.startswith("file"):
        store.check()
        assert store.spark_url(store.prefix_path) == store.prefix_path
        return
    for refused in (store.check, lambda: store.spark_url(store.prefix_path)):
        with pytest.raises(ParamError, match="memory of this process alone"):
            refused()


def test_a_store_goes_to_other_processes_by_pickling(store):
    there = pickle.loads(pickle.dumps(store))

    assert type(there) is type(store)
    assert there.run_paths("r1") == store.run_paths("r1")


def test_options_reach_the_filesystem(tmp_path):
    store = FilesystemStore(f"file://{tmp_path}", storage_options={"auto_mkdir": True})

    assert store.fs.auto_mkdir
    assert not store.without_options().fs.auto_mkdir


def test_others_open_the_urls_of_a_store_with_its_options_for_a_while(tmp_path):
    url = f"file://{tmp_path}"
    store = FilesystemStore(url, storage_options={"auto_mkdir": True})

    with store.options_for_others():
        assert fsspec.core.url_to_fs(url)[0].auto_mkdir
    assert not fsspec.core.url_to_fs(url)[0].auto_mkdir


def test_what_cannot_be_opened_is_told_when_a_store_is_made(monkeypatch):
    with pytest.raises(ParamError, match="cannot open 'nothing://a'"):
        FilesystemStore("nothing://a")
    with pytest.raises(ParamError, match="'file:///b', which is on another filesystem"):
        FilesystemStore("memory://a", train_path="file:///b")

    monkeypatch.setitem(sys.modules, "ossfs", None)
    with pytest.raises(DependencyError, match="ossfs"):
        FilesystemStore("oss://bucket/a")
