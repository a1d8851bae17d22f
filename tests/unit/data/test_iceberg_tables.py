"""Existing files of Iceberg tables: only those of the current version are read."""

from __future__ import annotations

import datetime
import gzip
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from foreign import read
from hypothesis import given, settings
from hypothesis import strategies as st
from iceberg_tables import append, create
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import (
    DateType,
    DoubleType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from hvd_estimators import Store
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.tables import read_log
from hvd_estimators.exceptions import DataError, StoreError

pytestmark = pytest.mark.versions

DOUBLE, LONG = DoubleType(), LongType()


def doubles(*values: float) -> pa.Table:
    return pa.table({"x": pa.array(values, pa.float64())})


def load(path: str | Path, *names: str) -> dict[str, Any]:
    manifest = read_manifest(Store.create(str(path)), str(path), None, names)
    return read(manifest.train, manifest.columns)


def values(path: str | Path) -> list[float]:
    return sorted(load(path, "x")["x"])


def test_removed_files_are_not_read(tmp_path: Path) -> None:
    """The path may also be the folder of the data, or one file."""
    table = create(tmp_path / "table", x=DOUBLE)
    first = append(table, doubles(1, 2))
    second = append(table, doubles(3))
    third = append(table, doubles(4), removed=[second])

    for path in (tmp_path / "table", tmp_path / "table" / "data"):
        assert values(path) == [1, 2, 4]
    assert values(first) == [1, 2]
    assert values(third) == [4]
    with pytest.raises(StoreError, match="There are no Parquet files under"):
        load(second, "x")
    with pytest.raises(StoreError, match=r"holds '.*/table', an Iceberg table"):
        load(tmp_path, "x")
    Path(first).unlink()
    with pytest.raises(StoreError, match=r"has a file '.*', which does not exist"):
        values(tmp_path / "table")


@settings(max_examples=20)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9)), st.sets(st.integers(0, 4))), max_size=6))
def test_rows_are_those_that_commits_left(commits: list[tuple[list[int], set[int]]]) -> None:
    """Each commit appends a file, and removes some of the others."""
    with tempfile.TemporaryDirectory() as folder:
        table = create(Path(folder, "table"), x=DOUBLE)
        kept = {append(table, doubles(-1)): [-1]}
        for rows, positions in commits:
            removed = [file for n, file in enumerate(kept) if n in positions]
            kept[append(table, doubles(*rows), removed=removed)] = rows
            kept = {file: rows for file, rows in kept.items() if file not in removed}
        expected = sorted(itertools.chain.from_iterable(kept.values()))
        if expected:
            assert values(Path(folder, "table")) == expected
        else:
            with pytest.raises(DataError, match="hold no rows"):
                values(Path(folder, "table"))


@pytest.mark.parametrize("content", ["POSITION_DELETES", "EQUALITY_DELETES"])
def test_delete_files_are_errors_where_they_hide_rows(tmp_path: Path, content: str) -> None:
    table = create(tmp_path / "table", by=["day"], x=DOUBLE, day=LONG)
    old, other = (
        append(table, pa.table({"x": [float(day)] * 2, "day": [day] * 2}), [day]) for day in (1, 2)
    )
    append(table, pa.table({"day": [1]}), [1], content=DataFileContent[content])
    new = append(table, pa.table({"x": [7.0], "day": [1]}), [1])

    # Files of other partitions, and newer ones, are whole.
    assert values(other) == [2, 2]
    assert values(new) == [7]
    for path in (old, tmp_path / "table"):
        with pytest.raises(DataError, match=rf"hides rows by delete files .*'{old}'.* fit\("):
            load(path, "x")
    # When the file has been rewritten, the delete file hides nothing.
    append(table, pa.table({"x": [5.0], "day": [1]}), [1], removed=[old])
    assert values(tmp_path / "table") == [2, 2, 5, 7]


def test_delete_files_without_partitions_hide_rows_of_all(tmp_path: Path) -> None:
    table = create(tmp_path / "table", x=DOUBLE, day=LONG)
    append(table, pa.table({"x": [1.0], "day": [1]}))
    append(table, pa.table({"day": [1]}), content=DataFileContent.EQUALITY_DELETES)
    with table.update_spec() as update:
        update.add_identity("day")
    append(table, pa.table({"x": [2.0], "day": [1]}), [1])
    with pytest.raises(DataError, match="hides rows by delete files"):
        values(tmp_path / "table")


def test_other_formats_than_parquet_are_errors(tmp_path: Path) -> None:
    table = create(tmp_path / "table", x=DOUBLE)
    append(table, doubles(1), file_format=FileFormat.ORC)
    with pytest.raises(DataError, match=r"has a file of the format ORC: .*fit\(spark\.read"):
        values(tmp_path / "table")


def test_rows_are_counted(tmp_path: Path) -> None:
    table = create(tmp_path / "table", x=DOUBLE)
    file = append(table, doubles(1, 2))
    shutil.copyfile(append(table, doubles(3)), file)
    with pytest.raises(DataError, match="shows 2 of the 1 rows"):
        values(tmp_path / "table")


def test_columns_are_known_by_their_numbers(tmp_path: Path) -> None:
    """Only changes of the columns that training needs are errors."""
    folder = tmp_path / "table"
    table = create(folder, x=DOUBLE, y=DOUBLE, z=DOUBLE)
    append(table, pa.table({"x": [1.0], "y": [2.0], "z": [3.0]}))
    with table.update_schema() as update:
        update.rename_column("y", "renamed")
        update.delete_column("z")
    with table.update_schema() as update:
        update.add_column("z", DOUBLE)
        update.add_column("added", DOUBLE)
    rows = {name: [4.0] for name in ("x", "renamed", "z", "added")}
    newest = append(table, pa.table(rows))

    assert values(folder) == [1, 4]
    for name in ("renamed", "z", "added"):
        with pytest.raises(StoreError, match=rf"column '{name}'.*renamed.*rewrite-all.*fit\("):
            load(folder, "x", name)
        assert load(newest, name)[name] == [4]


def identified(name: str, number: int, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})


@pytest.mark.parametrize("change", ["", "rename", "delete", "add"])
def test_nested_columns_are_known_by_their_numbers(tmp_path: Path, change: str) -> None:
    point = StructType(NestedField(4, "a", DOUBLE), NestedField(5, "b", DOUBLE))
    table = create(tmp_path / "table", x=DOUBLE, s=ListType(3, point, True))
    # pyiceberg has given numbers of its own.
    a, b = (table.schema().find_field(f"s.element.{name}").field_id for name in "ab")
    element = table.schema().find_field("s.element").field_id
    struct = pa.struct([identified("a", a, pa.float64()), identified("b", b, pa.float64())])
    column = identified("s", 2, pa.list_(identified("element", element, struct)))
    rows = pa.Table.from_arrays(
        [pa.array([1.0]), pa.array([[{"a": 1.0, "b": 2.0}]], column.type)],
        schema=pa.schema([identified("x", 1, pa.float64()), column]),
    )
    append(table, rows, has_ids=False)
    with table.update_schema() as update:
        if change == "rename":
            update.rename_column("s.element.b", "c")
        elif change == "delete":
            update.delete_column("s.element.b")
        elif change == "add":
            update.add_column(("s", "element", "c"), DOUBLE)

    def description() -> Any:
        store = Store.create(str(tmp_path))
        return read_manifest(store, str(tmp_path / "table"), None, ["s"], allow_text={"s": "any"})

    assert values(tmp_path / "table") == [1]
    if not change:
        assert description().train.rows == 1
        return
    with pytest.raises(StoreError, match="column 's'"):
        description()


def test_partition_values_are_those_of_all_partitionings(tmp_path: Path) -> None:
    kinds = {
        "day": (DateType(), 19000, datetime.date(2022, 1, 8)),
        "at": (TimestampType(), 10**15, datetime.datetime(2001, 9, 9, 1, 46, 40)),
        "name": (StringType(), "a/b", "a/b"),
        "number": (IntegerType(), None, None),
        "moment": (TimestamptzType(), 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1, datetime.UTC)),
    }
    types = {name: kind for name, (kind, _, _) in kinds.items()}
    table = create(tmp_path / "table", by=list(kinds), x=DOUBLE, **types)
    append(table, doubles(1), [value for _, value, _ in kinds.values()])
    store, path = Store.create(str(tmp_path)), str(tmp_path / "table")

    (file,) = read_log(store, "iceberg", path).files.values()
    assert file.values == {name: value for name, (_, _, value) in kinds.items()}

    with table.update_spec() as update:
        for name in ("day", "number", "moment"):
            update.remove_field(name)
        update.add_field("name", BucketTransform(4), "bucket")
    append(table, doubles(2), [10**15, "c", 3])
    log = read_log(store, "iceberg", path)
    assert sorted(file.values["name"] for file in log.files.values()) == ["a/b", "c"]
    assert all([*file.values] == ["at", "name"] for file in log.files.values())
    named = {field["name"]: field["type"] for field in json.loads(log.schema)["fields"]}
    assert named == {"at": "timestamp_ntz", "name": "string"}
    assert values(path) == [1, 2]


def test_a_remote_table_is_read_by_the_store(tmp_path: Path) -> None:
    table = create(tmp_path / "table", x=DOUBLE)
    removed = append(table, doubles(1))
    append(table, doubles(2), removed=[removed])
    url = f"memory://{tmp_path}/copy"
    store = Store.create(url)
    for file in (tmp_path / "table").rglob("*"):
        if file.is_file():
            with store.open_atomic(f"{url}/{file.relative_to(tmp_path / 'table')}") as opened:
                opened.write(file.read_bytes())

    assert read_manifest(store, url, None, ["x"]).train.rows == 1
    store.fs.rm(url, recursive=True)


def metadata_files(table: Path) -> list[Path]:
    return sorted((table / "metadata").glob("*.metadata.json"))


@pytest.mark.parametrize(
    ("hint", "expected"),
    [("2", [1, 2, 3]), ("1", [1, 2, 3]), ("v1", [1, 2]), ("v2.metadata.json\n", [1, 2, 3])],
)
def test_the_hint_of_a_version_is_followed(tmp_path: Path, hint: str, expected: Any) -> None:
    """A table without a catalog: the hint may be older than the newest version."""
    table = create(tmp_path / "table", x=DOUBLE)
    append(table, doubles(1, 2))
    append(table, doubles(3))
    names = metadata_files(tmp_path / "table")
    folder = names[0].parent
    for version, file in enumerate(names):
        file.rename(folder / f"v{version}.metadata.json")
    (folder / "version-hint.text").write_text(hint)
    assert values(tmp_path / "table") == expected


def test_the_newest_metadata_is_read(tmp_path: Path) -> None:
    """Numbers are compared, not text; a tie cannot be decided without the catalog."""
    table = create(tmp_path / "table", x=DOUBLE)
    for x in range(11):
        append(table, doubles(x))
    assert values(tmp_path / "table") == [*range(11)]
    newest = metadata_files(tmp_path / "table")[-1]
    packed = newest.with_name(newest.name.replace(".metadata", ".gz.metadata"))
    packed.write_bytes(gzip.compress(newest.read_bytes()))
    with pytest.raises(StoreError, match="only its catalog says which metadata is current"):
        values(tmp_path / "table")
    newest.unlink()
    assert values(tmp_path / "table") == [*range(11)]
    (packed.parent / "version-hint.text").write_text("99")
    with pytest.raises(StoreError, match="only its catalog says which metadata is current"):
        values(tmp_path / "table")
    packed.with_name("version-hint.text").write_text("")
    packed.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(StoreError, match="pyiceberg cannot read its metadata"):
        values(tmp_path / "table")


def test_files_outside_the_folder_are_an_error(tmp_path: Path) -> None:
    table = create(tmp_path / "table", x=DOUBLE)
    append(table, doubles(1))
    with table.transaction() as transaction:
        transaction.set_properties()
    (newest,) = metadata_files(tmp_path / "table")[-1:]
    moved = newest.read_text().replace(f'"location":"file://{tmp_path}/table"', '"location":"/a"')
    newest.write_text(moved)
    with pytest.raises(StoreError, match=r"is outside its folder \('/a'\).*fit\("):
        values(tmp_path / "table")


def test_without_pyiceberg_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(create(tmp_path / "table", x=DOUBLE), doubles(1))
    monkeypatch.setitem(sys.modules, "pyiceberg.io", None)
    with pytest.raises(StoreError, match=r"Run: pip install .*\[tables\].*Or train on its DataF"):
        values(tmp_path / "table")


def test_files_of_other_programs_are_known_by_names(tmp_path: Path) -> None:
    """These have no numbers of columns."""
    table = create(tmp_path / "table", x=DOUBLE, y=DOUBLE)
    append(table, pa.table({"y": [1.0], "x": [2.0]}), has_ids=False)
    append(table, pa.table({"x": [3.0]}), has_ids=False)
    assert values(tmp_path / "table") == [2, 3]
    with pytest.raises(StoreError, match="column 'y'"):
        load(tmp_path / "table", "y")
