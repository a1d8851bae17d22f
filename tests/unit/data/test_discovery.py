"""Description of Parquet files from their footers."""

import io
import os
import re
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data import footers
from hvd_estimators.data.discovery import first_rows, read_manifest, read_split
from hvd_estimators.data.footers import FileFooter, read_footers
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import MOST_LISTED, ColumnError, DataError, StoreError
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


def test_hidden_parent_folders_hide_nothing(tmp_path):
    folder = tmp_path / ".cache" / "_data"
    folder.mkdir(parents=True)
    write(folder / "a.parquet", x=[1.0])

    assert read_split(LocalStore(str(tmp_path)), str(folder), [X])[0].rows == 1


def test_a_single_file_is_a_dataset(store, folder):
    write(folder / "a.parquet", x=[1.0, 2.0])

    assert manifest(store, folder / "a.parquet", "x").train.rows == 2


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


def test_validation_files_without_rows_are_an_error(store, folder, tmp_path):
    validation = tmp_path / "validation"
    validation.mkdir()
    write(folder / "a.parquet", x=[1.0, 2.0])
    write(validation / "a.parquet", x=pa.array([], pa.float64()))

    with pytest.raises(DataError, match=r"The Parquet files under '.*validation' hold no rows"):
        manifest(store, folder, "x", validation=validation)


def test_markers_of_folders_that_hadoop_writes_are_no_data(store, folder):
    (folder / "day=1").mkdir()
    write(folder / "day=1" / "a.parquet", x=[1.0])
    (folder / "day=1_$folder$").write_bytes(b"")

    assert manifest(store, folder, "x").train.rows == 1


def test_errors_about_missing_columns_list_the_existing_ones(store, folder):
    write(folder / "a.parquet", x=[1.0], y=[2.0])

    with pytest.raises(ColumnError, match=r"no column 'z'; their columns are x, y"):
        manifest(store, folder, "x", "z")


def test_errors_list_the_first_of_many_columns(store, folder):
    write(folder / "a.parquet", **{f"c{number}": [1.0] for number in range(1000)})

    with pytest.raises(ColumnError) as caught:
        manifest(store, folder, "z")
    assert "their columns are c0, c1, " in str(caught.value)
    assert f"c{MOST_LISTED - 1} and {1000 - MOST_LISTED} others (read" in str(caught.value)


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


@pytest.mark.timeout(30)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_pipes_among_files_are_an_error(folder, scheme):
    write(folder / "a.parquet", x=[1.0])
    os.mkfifo(folder / "b.parquet")
    store = Store.create(f"{scheme}{folder}")

    with pytest.raises(StoreError, match=r"b\.parquet' is not a regular file but a pipe"):
        manifest(store, f"{scheme}{folder}", "x")


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


def test_partitions_of_hudi_are_recognized_by_their_marker(store, folder):
    write(folder / "part.parquet", x=[1.0])
    (folder / ".hoodie_partition_metadata").write_text("")
    with pytest.raises(StoreError, match="is a Hudi table"):
        manifest(store, folder, "x")


def test_folders_that_only_resemble_tables_are_read(store, folder):
    """Names alone, or other files in the folders, do not make a table."""
    for name in ("metadata", "data/day=1"):
        (folder / name).mkdir(parents=True)
        write(folder / name / "part.parquet", x=[1.0])
    (folder / "metadata" / "_notes.json").write_text("")
    assert manifest(store, folder, "x").train.rows == 2
    assert manifest(store, folder / "data" / "day=1", "x").train.rows == 1
    assert manifest(store, folder / "data", "x").train.rows == 1


def test_links_to_files_are_read_and_others_are_errors(store, folder, tmp_path):
    write(tmp_path / "target.parquet", x=[1.0, 2.0])
    (folder / "link.parquet").symlink_to(tmp_path / "target.parquet")
    assert manifest(store, folder, "x").train.rows == 2

    (folder / "lost.parquet").symlink_to(tmp_path / "missing.parquet")
    with pytest.raises(StoreError, match=r"lost\.parquet"):
        manifest(store, folder, "x")

    (folder / "lost.parquet").unlink()
    (folder / "folder.parquet").symlink_to(tmp_path)
    with pytest.raises(StoreError, match=r"folder\.parquet' is not a regular file"):
        manifest(store, folder, "x")


def test_files_with_equal_schemas_share_their_columns(store, folder):
    """pandas also stores the number of rows; Arrow's types may differ for equal Parquet types."""
    pd.DataFrame({"x": [1.0, 2.0]}).to_parquet(folder / "a.parquet", index=True)
    pd.DataFrame({"x": [1.0, 2.0, 3.0]}).to_parquet(folder / "b.parquet", index=True)
    for name, data_type in (("c", pa.list_), ("d", pa.large_list), ("e", pa.list_)):
        write(folder / f"{name}.parquet", x=pa.array([[1.0]], data_type(pa.float64())))

    a, b, c, d, e = read_footers(store, str(folder), select=lambda footer: footer.columns)

    assert a is b
    assert c is e
    assert c is not d
    assert [columns.schema.field("x").type for columns in (a, c, d)] == [
        pa.float64(),
        pa.list_(pa.float64()),
        pa.large_list(pa.float64()),
    ]


def test_types_are_compared_with_each_schema_once_and_nulls_in_each_file(store, folder):
    for number in range(40):
        values = pa.array([None if number == 37 else 2.0], pa.float64())
        write(folder / f"{number:02}.parquet", x=[1.0], y=values)
    assert manifest(store, folder, "x").train.rows == 40
    with pytest.raises(DataError, match=r"'y' holds 1 null.*37\.parquet"):
        manifest(store, folder, "x", "y")
    write(folder / "38.parquet", x=[1.0], y=[[2.0]])
    (folder / "37.parquet").unlink()
    with pytest.raises(ColumnError, match=r"'y' has type list<.*38\.parquet"):
        manifest(store, folder, "x", "y")


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


NUMBERS = pa.array([[0.0, 1.0]] * 3)


SECOND_FILES = {
    "renamed": {"a": NUMBERS, "c": NUMBERS},
    "reordered": {"b": NUMBERS, "a": NUMBERS},
    "regrouped": {"a": NUMBERS, "b": pa.StructArray.from_arrays([NUMBERS], ["c"])},
    "retyped": {"a": NUMBERS.cast(pa.list_(pa.float32())), "b": NUMBERS},
}


@pytest.mark.parametrize("columns", SECOND_FILES.values(), ids=SECOND_FILES)
def test_files_with_equal_leaves_have_their_own_columns(folder, columns):
    # Without Arrow's schema, as Spark writes files: all leaves are called "element".
    first, second = folder / "first.parquet", folder / "second.parquet"
    parquet.write_table(pa.table({"a": NUMBERS, "b": NUMBERS}), first, store_schema=False)
    parquet.write_table(pa.table(columns), second, store_schema=False)

    FileFooter.of("", first.read_bytes())
    footer = FileFooter.of("", second.read_bytes())

    assert footer.columns.schema.names == list(columns)
    for name, column in columns.items():
        assert footer.columns.schema.field(name).type == column.type
        group = parquet.read_metadata(second).row_group(0)
        (leaf,) = (i for i in range(2) if group.column(i).path_in_schema.startswith(f"{name}."))
        assert list(footer.columns.leaves[name]) == [leaf]
