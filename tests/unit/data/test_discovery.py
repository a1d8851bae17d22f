"""Description of Parquet files from their footers."""

import io
import re
import threading

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data import footers
from hvd_estimators.data.discovery import first_rows, read_manifest, read_split
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ColumnError, DataError, StoreError
from hvd_estimators.store import LocalStore, Store

pytestmark = pytest.mark.versions

X = ColumnSpec("x", "scalar", "float64")


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path))


def write(path, row_group_size=None, **columns):
    parquet.write_table(pa.table(columns), path, row_group_size=row_group_size)


def manifest(store, folder, *names, validation=None):
    return read_manifest(store, str(folder), validation and str(validation), names)


def placed(split):
    """Return file, index and rows of each row group."""
    return [(group.file, group.index, group.rows) for group in split.row_groups]


def test_row_groups_follow_the_order_of_file_names(store, folder):
    write(folder / "part-2.parquet", x=[5.0, 6.0])
    write(folder / "part-1.parquet", row_group_size=2, x=[0.0, 1.0, 2.0, 3.0, 4.0])

    split = read_split(store, str(folder), [X])[0]

    first, second = str(folder / "part-1.parquet"), str(folder / "part-2.parquet")
    assert split.path == str(folder)
    assert placed(split) == [(first, 0, 2), (first, 1, 2), (first, 2, 1), (second, 0, 2)]


def test_first_rows_come_only_from_the_first_row_group(store, folder):
    write(folder / "a.parquet", row_group_size=2, x=[1.0, 2.0, 3.0], y=[[1, 2], [3, 4], [5, 6]])
    found = manifest(store, folder, "x", "y")

    np.testing.assert_array_equal(first_rows(store, found, 1)["x"], [1.0])
    np.testing.assert_array_equal(first_rows(store, found, 5)["y"], [[1, 2], [3, 4]])


def test_validation_files_are_described_with_the_training_files(store, folder, tmp_path):
    validation = tmp_path / "validation"
    validation.mkdir()
    write(folder / "a.parquet", x=[1.0, 2.0])
    write(validation / "a.parquet", x=[3.0])

    found = manifest(store, folder, "x", validation=validation)

    assert (found.train.rows, found.validation.rows) == (2, 1)
    assert manifest(store, folder, "x").validation is None


def test_errors_about_missing_columns_list_the_existing_ones(store, folder):
    write(folder / "a.parquet", x=[1.0], y=[2.0])

    with pytest.raises(ColumnError, match=r"no column 'z'; their columns are x, y"):
        manifest(store, folder, "x", "z")


def test_errors_name_files_that_lack_a_column(store, folder):
    write(folder / "a.parquet", x=[1.0])
    write(folder / "b.parquet", y=[1.0])

    with pytest.raises(ColumnError, match=r"b\.parquet' has no column 'x'"):
        manifest(store, folder, "x")


@pytest.mark.parametrize("values", [[1.0, None], [[1.0], None], [[1.0], [None]]])
def test_errors_about_nulls_name_the_column(store, folder, values):
    write(folder / "a.parquet", x=[1.0, 2.0], price=values)

    with pytest.raises(DataError, match=r"'price' holds 1 null"):
        manifest(store, folder, "x", "price")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nulls_in_any_row_group_of_the_last_file_are_found(store, folder, place):
    values = [1.0, 2.0, 3.0]
    values[place] = None
    write(folder / "a.parquet", x=[1.0, 2.0])
    write(folder / "b.parquet", row_group_size=1, x=values)

    with pytest.raises(DataError, match="'x' holds 1 null"):
        read_split(store, str(folder), [X])[0]


def test_missing_paths_and_empty_folders_are_errors(store, folder):
    with pytest.raises(StoreError, match=r"no Parquet dataset at .*absent"):
        manifest(store, folder / "absent", "x")
    with pytest.raises(StoreError, match="no Parquet files under"):
        manifest(store, folder, "x")


@pytest.mark.parametrize("remote", [False, True], ids=["local", "memory"])
def test_folders_of_hudi_tables_are_rejected(tmp_path, remote):
    """The path may be the table, its parent, a partition or one of its files."""
    root = f"memory://{tmp_path}" if remote else str(tmp_path)
    made = Store.create(root)
    data = f"{root}/outer/table"
    buffer = io.BytesIO()
    parquet.write_table(pa.table({"x": [1.0]}), buffer)
    for file in (f"{data}/a=1/b=2/part.parquet", f"{data}/part.parquet", f"{root}/plain/x.parquet"):
        with made.open_atomic(file) as opened:
            opened.write(buffer.getvalue())
    made.write_text(f"{data}/.hoodie/hoodie.properties", "{}")

    inner = ["outer", "outer/table", "outer/table/part.parquet", "outer/table/a=1/b=2"]
    for path in (f"{root}/{name}" for name in inner):
        told = (
            r"Hudi table: .*removed.*spark\.read\.format\(\"hudi\"\)"
            rf"\.load\(\"{re.escape(root)}/outer/table\"\)"
        )
        with pytest.raises(StoreError, match=told):
            read_manifest(made, path, None, ["x"])
        with pytest.raises(StoreError, match=told):
            read_manifest(made, f"{root}/plain", path, ["x"])
    assert read_manifest(made, f"{root}/plain", None, ["x"]).train.rows == 1
    if remote:
        made.fs.rm(root, recursive=True)


@pytest.mark.parametrize("slow", [False, True])
def test_footers_keep_the_order_of_the_files_with_and_without_threads(
    store, folder, slow, monkeypatch
):
    """Files on a slow mount are read in threads."""
    monkeypatch.setattr(footers, "_FAST_SECONDS", 0 if slow else 60)
    monkeypatch.setattr(footers, "_FILES_PER_TASK", 3)
    threads = set()
    read = footers.read_tail

    def read_and_note(store, path):
        threads.add(threading.current_thread())
        return read(store, path)

    monkeypatch.setattr(footers, "read_tail", read_and_note)
    for number in range(60):
        write(folder / f"{number:02}.parquet", x=[1.0] * (number + 1))
    found = read_split(store, str(folder), [X])[0]
    assert [group.rows for group in found.row_groups] == list(range(1, 61))
    assert (threads == {threading.current_thread()}) is not slow
