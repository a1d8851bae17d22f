"""Paths of existing Parquet files, and the store that opens them."""

import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.parquet_files import find_files
from hvd_estimators.store import FilesystemStore, LocalStore, Store


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
