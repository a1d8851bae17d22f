"""Stores on fsspec filesystems, and the store class for each scheme."""

import importlib
import pickle
import sys
import types

import fsspec
import pytest

from hvd_estimators.exceptions import DependencyError, ParamError, StoreError
from hvd_estimators.store import FilesystemStore, LocalStore, RunPaths, Store, register_store
from hvd_estimators.store.registry import _stores, registered_schemes, scheme_of, store_class


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Restore the registries after the test."""
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


def test_each_scheme_has_a_store_class_or_a_helpful_error():
    assert store_class("/data") is store_class("file:///data") is LocalStore
    assert type(Store.create("memory://data")) is FilesystemStore

    with pytest.raises(ParamError, match=r"scheme 'nothing'.*one of: abfs, .*, file, .*s3a,"):
        Store.create("nothing://a")


def test_schemes_can_be_registered_by_class_or_name(monkeypatch):
    class Mine(FilesystemStore):
        pass

    register_store("Memory", Mine)
    assert type(Store.create("memory://data")) is Mine

    module = types.ModuleType("stores_of_somebody")
    module.Theirs = Mine
    monkeypatch.setitem(sys.modules, "stores_of_somebody", module)
    register_store("theirs", "stores_of_somebody:Theirs")
    assert store_class("theirs://data") is Mine

    assert {"file", "memory", "theirs"} < set(registered_schemes())


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


def write_half(store, path, error):
    with store.open_atomic(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_writes_keep_the_existing_file(store, error):
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


def test_memory_stores_are_rejected_for_spark_and_training(store):
    if store.prefix_path.startswith("file"):
        store.check()
        assert store.spark_url(store.prefix_path) == store.prefix_path
        return
    for refused in (store.check, lambda: store.spark_url(store.prefix_path)):
        with pytest.raises(ParamError, match="memory of this process alone"):
            refused()


def test_storage_options_reach_the_filesystem(tmp_path):
    store = FilesystemStore(f"file://{tmp_path}", storage_options={"auto_mkdir": True})

    assert store.fs.auto_mkdir
    assert not store.without_options().fs.auto_mkdir


def test_unusable_filesystems_are_reported_at_construction(monkeypatch):
    with pytest.raises(ParamError, match="cannot open 'nothing://a'"):
        FilesystemStore("nothing://a")
    with pytest.raises(ParamError, match="'file:///b', which is on another filesystem"):
        FilesystemStore("memory://a", train_path="file:///b")

    monkeypatch.setitem(sys.modules, "ossfs", None)
    with pytest.raises(DependencyError, match="ossfs"):
        FilesystemStore("oss://bucket/a")


def test_s3_and_s3a_name_the_same_store():
    options = {"key": "AKIAEXAMPLE", "secret": "s3cr3t!"}
    store = Store.create("s3://bucket/data/", storage_options=options)
    assert store.prefix_path == "s3://bucket/data"
    assert store.spark_urls(store.get_train_data_path("7f")) == (
        "s3://bucket/data/intermediate_train_data.7f",
        "s3a://bucket/data/intermediate_train_data.7f",
    )
    # Files written under one scheme are found under the other: paths are the same.
    other = Store.create("s3a://bucket/data", storage_options=options)
    assert other.prefix_path == store.prefix_path
    assert other.spark_url(other.prefix_path) == "s3a://bucket/data"
    assert other.spark_urls(other.prefix_path)[1] == "s3://bucket/data"

    assert "s3cr3t!" not in repr(store)
    assert pickle.loads(pickle.dumps(store)).storage_options == options
    assert store.secrets == set(options.values())
    assert store.without_options().storage_options == {}
    assert not store.save_storage_options


def test_errors_name_the_missing_package_and_how_to_install_it(monkeypatch):
    for module in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DependencyError, match=r'pip install "<clone or .*>\[gcs\]".*executors'):
        Store.create("gs://bucket/a")
    with pytest.raises(DependencyError, match=r"hvd_estimators>\[azure\]"):
        Store.create("abfss://container@account.dfs.core.windows.net/a")


class AzureInMemory(fsspec.get_filesystem_class("memory")):
    """Filesystem with adlfs's paths: the account is part of a URL, but not of a path."""

    protocol = ("abfs", "az", "abfss")

    @classmethod
    def _strip_protocol(cls, path):
        container, slash, rest = path.split("://")[-1].partition("/")
        return (container.partition("@")[0] + slash + rest).rstrip("/")

    def unstrip_protocol(self, name):
        return f"abfs://{self._strip_protocol(name)}"


def test_azure_urls_for_spark_and_other_packages_include_the_account(monkeypatch):
    registry = importlib.import_module("fsspec.registry")  # not the dict with the same name
    for scheme in AzureInMemory.protocol:
        monkeypatch.setitem(registry._registry, scheme, AzureInMemory)
    url = "abfss://container@account.dfs.core.windows.net/a"
    for given, options in (
        (url, {}),
        (url.replace("abfss", "abfs"), {}),
        ("az://container/a", {"account_name": "account"}),
    ):
        store = Store.create(given, storage_options=options)
        assert store.prefix_path == "abfs://container/a"
        assert store.spark_urls(store.prefix_path) == (url,)
        assert store.url(store.prefix_path) == url
        assert store.fs.storage_options["account_name"] == "account"
    with pytest.raises(ParamError, match="on another filesystem"):
        Store.create(url, train_path=url.replace("account", "other"))
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ParamError, match="Spark needs the name of the account"):
        Store.create("az://container/a").spark_url("abfs://container/a")


def test_glob_characters_in_names_are_literal(store):
    for name in ("a?c", "abc", "[a]"):
        store.write_text(f"{store.prefix_path}/{name}", name)
    store.delete(f"{store.prefix_path}/a?c")
    assert store.names(store.prefix_path) == ["[a]", "abc"]
    with pytest.raises(ParamError, match="for patterns"):
        FilesystemStore(f"{store.prefix_path}/data[1]")
