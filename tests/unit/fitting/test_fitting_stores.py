"""Stores of fits: default stores, stores given as paths, and those of existing Parquet files."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting import stores as module
from hvd_estimators.fitting.stores import STORE_SETTING, default_store, find_files
from hvd_estimators.store import FilesystemStore, LocalStore, Store
from hvd_estimators.torch import TorchEstimator


@pytest.fixture
def settings(monkeypatch):
    """Return the settings of this thread's Spark session, which can be changed."""
    found = {"spark.master": "local[2]"}
    session = SimpleNamespace(conf=SimpleNamespace(get=found.get))
    monkeypatch.setattr(module, "known_session", lambda: session)
    return found


@pytest.mark.parametrize("form", [str, Path])
def test_paths_are_stores(tmp_path, form):
    store = TorchEstimator(store=form(tmp_path)).getStore()
    assert isinstance(store, Store)
    assert store.prefix_path == Store.create(str(tmp_path)).prefix_path


def test_local_spark_gets_one_temporary_folder(settings, caplog):
    module._temporary_store.cache_clear()
    with caplog.at_level(logging.INFO):
        store = default_store()

    assert os.path.isdir(store.prefix_path)
    assert default_store() == store
    (line,) = caplog.messages
    assert store.prefix_path in line
    assert "store is not set" in line


def test_the_setting_of_the_application_is_its_default(settings, tmp_path):
    settings[STORE_SETTING] = str(tmp_path / "runs of all")
    settings["spark.master"] = "yarn"
    assert default_store().prefix_path == str(tmp_path / "runs of all")

    settings[STORE_SETTING] = "ftp://host/path"
    with pytest.raises(ParamError, match=rf"^{STORE_SETTING}: no store for the scheme"):
        default_store()


@pytest.mark.parametrize("master", ["yarn", "spark://host:7077", "k8s://https://host"])
def test_a_cluster_has_no_default(settings, master):
    settings["spark.master"] = master
    with pytest.raises(ParamError, match=f"^store is not set.*{STORE_SETTING}.*{master}"):
        default_store()


def test_the_folder_is_deleted_when_the_program_ends_and_not_when_its_child_ends():
    code = (
        "import os, sys\n"
        "from hvd_estimators.fitting.stores import default_store\n"
        "path = default_store().prefix_path\n"
        "child = os.fork()\n"
        "if not child: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(path, os.path.isdir(path))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, existed = done.stdout.split()
    assert existed == "True"
    assert not os.path.exists(path)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Store.create(str(tmp_path / "own"))


@pytest.mark.parametrize("form", ["{0}/rows", "file://{0}/rows", "rows", "./rows/"])
def test_the_runs_store_opens_paths_on_its_filesystem(own, tmp_path, form):
    (tmp_path / "rows").mkdir()
    files = find_files(own, form.format(tmp_path), [tmp_path / "a", "b"])
    assert files.store is own
    (found,) = files.train
    assert (tmp_path / "rows").samefile(found)
    assert files.validation == (str(tmp_path / "a"), str(tmp_path / "b"))


def test_without_a_path_the_training_rows_are_those_of_the_store(own):
    files = find_files(own, None, None)
    assert (files.store, files.train, files.validation) == (own, (own.get_train_data_path(),), ())


def test_other_filesystems_get_a_store_without_the_options_of_the_run(tmp_path):
    own = LocalStore(str(tmp_path), storage_options={"auto_mkdir": True})
    files = find_files(own, ["memory://rows/a", "memory://rows/b/"], "memory://rows/c")
    assert isinstance(files.store, FilesystemStore)
    assert files.store.storage_options == {}
    assert files.train == ("memory:///rows/a", "memory:///rows/b")
    assert files.validation == ("memory:///rows/c",)

    in_memory = Store.create("memory://runs")
    assert find_files(in_memory, "memory://rows", None).store is in_memory
    assert find_files(in_memory, str(tmp_path), None).train == (str(tmp_path),)


@pytest.mark.parametrize(
    ("path", "validation", "message"),
    [
        ("rows", "memory://rows", "^validation_path: .*'memory://rows'.*'rows'"),
        (["memory://a", "rows"], None, "^path: .*'rows'.*'memory://a'"),
        ("ftp://host/rows", None, "^path: no store for the scheme 'ftp'"),
        ("dbfs:/rows", None, "^path: no store for the scheme 'dbfs'"),
        ("rows", "s3://key:secret@bucket/rows", "^validation_path: .*storage_options"),
        ("", None, "^path: expected a path or URL"),
        (["rows", None], None, "^path: expected"),
        ({"rows"}, None, "^path: expected"),
    ],
)
def test_wrong_paths_are_rejected(own, path, validation, message):
    with pytest.raises(ParamError, match=message):
        find_files(own, path, validation)
