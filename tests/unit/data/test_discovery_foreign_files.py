"""Parquet files of other writers: names, differing files, and nulls."""

import contextlib
import decimal
import re
from dataclasses import replace
from pathlib import Path

import counted
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from foreign import check, describe, load, load_one, write
from pyarrow import parquet

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.discovery import first_rows, read_manifest
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.types import column_spec
from hvd_estimators.exceptions import ColumnError, DataError, StoreError
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule

pytestmark = pytest.mark.versions

READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed with today's PyArrow
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule


def test_unusual_names_do_not_clash_with_paths_of_structs_and_lists(folder):
    """Paths of struct fields and list elements equal the names of other columns."""
    table = pa.table(
        {
            "a": [{"b": None, "c": [None]}, {"b": 1, "c": [1]}],
            "a.b": [1, 2],
            "a.c": [[3], [4]],
            "a.c.list.element": [5, 6],
            "größe (cm)": [7, 8],
            "x": [9, 10],
            "X": [11, 12],
            "m": pa.array([[("k", None)], None], pa.map_(pa.string(), pa.int64())),
            "z": [13, 14],
        }
    )
    parquet.write_table(table, folder / "a.parquet")
    names = ["z", "X", "x", "größe (cm)", "a.c.list.element", "a.c", "a.b"]

    found = load(folder, *names)

    for name in names:
        np.testing.assert_array_equal(found[name], table[name].to_pylist())
    with pytest.raises(ColumnError, match="no column 'Z'"):
        describe(folder, "Z")


def test_nulls_are_counted_per_column(folder):
    table = pa.table({"a": [{"b": 1}, {"b": 2}], "a.b": [None, 2], "c": [1, 2]})
    parquet.write_table(table, folder / "a.parquet")

    assert describe(folder, "c").train.rows == 2
    with pytest.raises(DataError, match=r"'a\.b' holds 1 null.*a\.parquet"):
        describe(folder, "a.b")


def test_duplicate_names_in_a_file_are_an_error(folder):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["c", "c"])
    parquet.write_table(table, folder / "a.parquet")

    with pytest.raises(ColumnError, match="2 columns named 'c'"):
        describe(folder, "c")


def test_files_without_data_are_skipped_whatever_their_names(folder):
    for index, name in enumerate(["part-0", "b.snappy.parquet", "sub/folder/c.PARQUET"]):
        write(folder / name, x=[float(index)])
    marks = ["_SUCCESS", "_metadata", "_common_metadata", ".part-0.crc", "part-0.crc", ".hidden/a"]
    for name in [*marks, "_temporary/0/x.parquet", "sub/_SUCCESS", "sub/.DS_Store"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"no Parquet")

    assert sorted(load(folder, "x")["x"]) == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"notes", b"PAR1" * 3, None])
def test_errors_about_non_parquet_files_suggest_a_fix(folder, content):
    write(folder / "a.parquet", x=np.arange(1000.0))
    whole = (folder / "a.parquet").read_bytes()
    (folder / "notes.txt").write_bytes(whole[: len(whole) // 2] if content is None else content)

    with pytest.raises(StoreError, match=r"cannot read .*notes\.txt'.*move it away"):
        describe(folder, "x")


def test_first_rows_and_shapes_are_read_without_the_row_group(tmp_path):
    rows = 2_000_000
    lists = pa.ListArray.from_arrays(np.arange(0, 4 * rows + 1, 4), np.random.rand(4 * rows))
    table = pa.table({"x": np.random.rand(rows), "y": lists})
    store, requests = counted.make_store(tmp_path)
    url = f"{store.prefix_path}/data/a.parquet"
    path = Path(store.local(url))
    path.parent.mkdir(parents=True)
    parquet.write_table(table, path, row_group_size=rows, compression=None, use_dictionary=False)
    assert parquet.read_metadata(path).num_row_groups == 1

    found = first_rows(store, read_manifest(store, url, None, ["x", "y"]), 11)

    assert found["y"].shape == (11, 4)
    np.testing.assert_array_equal(found["x"], table["x"].to_numpy()[:11])
    # A page has about 1 MiB, and a request some more; the columns of the row group have 76 MiB.
    assert 0 < sum(size for _, _, size in requests.take()) < path.stat().st_size / 3


def test_types_come_from_the_first_file_with_rows(folder):
    """Pandas has no type for the columns of an empty frame, and Spark writes such files first."""
    empty = pd.DataFrame({"x": [], "y": pd.Series([], dtype=object)})
    empty.to_parquet(folder / "a.parquet")
    assert pa.types.is_null(parquet.read_schema(folder / "a.parquet").field("y").type)
    write(folder / "b.parquet", other=pa.array([], pa.string()))
    write(folder / "c.parquet", y=[[1, 2], [3, 4]], x=[1, 2])
    empty.to_parquet(folder / "d.parquet")

    found = load(folder, "x", "y")

    check(found["x"], np.array([1, 2]))
    check(found["y"], np.array([[1, 2], [3, 4]]))


def test_row_groups_without_rows_are_skipped(folder):
    schema = pa.schema([("x", pa.int64()), ("y", pa.list_(pa.int64()))])
    with parquet.ParquetWriter(folder / "a.parquet", schema) as writer:
        writer.write_table(schema.empty_table())
        writer.write_table(pa.table({"x": [1, 2], "y": [[1], [2]]}, schema))
        writer.write_table(schema.empty_table())
        writer.write_table(pa.table({"x": [3], "y": [[3]]}, schema))
    assert parquet.read_metadata(folder / "a.parquet").num_row_groups == 4

    assert [group.index for group in describe(folder, "x").train.row_groups] == [1, 3]
    check(load(folder, "x", "y")["y"], np.array([[1], [2], [3]]))


def test_only_files_without_rows_are_an_error(folder):
    write(folder / "a.parquet", y=pa.array([], pa.null()))

    with pytest.raises(DataError, match="hold no rows"):
        describe(folder, "x")


def test_column_order_and_other_columns_may_differ(folder):
    write(folder / "a.parquet", x=[1], y=[2.0], z=["a"])
    write(folder / "b.parquet", w=[{"y": None}], y=[3.0], x=[4])

    found = load(folder, "x", "y")

    check(found["x"], np.array([1, 4]))
    check(found["y"], np.array([2.0, 3.0]))


def test_kinds_of_lists_and_of_decimals_may_differ(folder):
    kinds = [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)]
    money = [pa.decimal128(10, 2), pa.decimal256(40, 1), pa.float64()]
    for name, lists, amount in zip("abc", kinds, money, strict=True):
        amounts = pa.array([decimal.Decimal("1.5")], pa.decimal128(10, 2)).cast(amount)
        write(folder / f"{name}.parquet", x=pa.array([[1, 2]], lists), y=amounts)

    found = load(folder, "x", "y")

    check(found["x"], np.array([[1, 2]] * 3))
    check(found["y"], np.array([1.5] * 3))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (pa.int64(), pa.float64()),
        (pa.uint64(), pa.int8()),
        (pa.bool_(), pa.int8()),
        (pa.list_(pa.int64()), pa.list_(pa.float32())),
        (pa.int64(), pa.list_(pa.int64())),
        (pa.list_(pa.int64()), pa.list_(pa.list_(pa.int64()))),
        (pa.list_(pa.int64(), 1), pa.list_(pa.int64(), 2)),
        (pa.binary(2), pa.binary(3)),
    ],
)
@pytest.mark.parametrize("part", ["data", "validation"])
def test_errors_about_differing_types_name_both_files(folder, first, other, part):
    one, two = folder / "a.parquet", folder.parent / part / "b.parquet"
    write(one, c=value_of(first))
    write(two, c=value_of(other))
    stored = [parquet.read_schema(file).field("c").type for file in (one, two)]

    text = f"'c' has type {stored[1]} in '{two}', but type {stored[0]} in '{one}'."
    with pytest.raises(ColumnError, match=re.escape(text)):
        describe(folder, "c", validation=folder.parent / part)


WIDENED = [
    ("int32", "int64", "int64"),
    ("int8", "uint8", "int16"),
    ("uint32", "int32", "int64"),
    ("float32", "float64", "float64"),
    ("int32", "float32", "float64"),
    ("int8", "float32", "float32"),
]


@pytest.mark.parametrize(("one", "two", "wide"), WIDENED)
@pytest.mark.parametrize("order", [1, -1])
def test_types_are_widened_to_one_that_holds_all_numbers(folder, one, two, wide, order):
    parts = [np.array([extreme(dtype).min, extreme(dtype).max], dtype) for dtype in (one, two)]
    for i, part in enumerate(parts[::order]):
        lists = pa.list_(pa.from_numpy_dtype(part.dtype))
        write(folder / f"{i}.parquet", x=part, v=pa.array([[n] for n in part], lists))

    found, manifest = load(folder, "x", "v"), describe(folder, "x", "v")

    expected = np.concatenate([part.astype(wide) for part in parts[::order]])
    check(found["x"], expected)
    check(found["v"], expected[:, None])
    assert manifest.columns[0].range == (expected.min(), expected.max())
    for reader in READERS.values():
        with reader(
            train_dir=manifest.train.path,
            val_dir=None,
            columns=manifest.columns,
            train_plan=plan_shards(manifest.train.row_groups, 1),
            train_batch_size=4,
            shuffle=False,
            total_train_steps=1,
        ) as module:
            batch = next(iter(module.train_data()))
        check(batch["x"], expected)
        check(batch["v"], expected[:, None])


def extreme(dtype):
    return np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)


def value_of(data_type):
    def value(leaf):
        if pa.types.is_primitive(leaf):
            return leaf == pa.bool_() or 1
        if pa.types.is_fixed_size_binary(leaf):
            return b"a" * leaf.byte_width
        return [value(leaf.value_type)] * getattr(leaf, "list_size", 1)

    return pa.array([value(data_type)], data_type)


def test_errors_name_files_that_hold_only_nulls(folder):
    write(folder / "a.parquet", x=[1.0])
    write(folder / "b.parquet", x=[None, None])

    with pytest.raises(DataError, match=r"'x' holds nothing but nulls in .*b\.parquet"):
        describe(folder, "x")


SPOILED = [
    (pa.float64(), [1.0, None]),
    (pa.bool_(), [True, None]),
    (pa.list_(pa.int64()), [[1, 2], None]),
    (pa.list_(pa.int64()), [[1, 2], [3, None]]),
    (pa.list_(pa.list_(pa.int64())), [[[1], [2]], [[1], None]]),
    (pa.list_(pa.list_(pa.int64()), 2), [[[1], [2]], None]),
    (pa.list_(pa.list_(pa.int64(), 1), 2), [[[1], [2]], [[1], None]]),
    (pa.list_(pa.list_(pa.int64(), 1), 2), [[[1], [2]], [[1], [None]]]),
    (pa.binary(), [b"a", None]),
    (pa.binary(1), [b"a", None]),
    (pa.decimal128(5, 2), [decimal.Decimal(1), None]),
]


@pytest.mark.parametrize(("data_type", "values"), SPOILED, ids=lambda case: str(case)[:40])
def test_nulls_without_statistics_are_found_during_reading(data_type, values):
    table = pa.table({"c": pa.array([*values, values[0]], data_type)})
    shape, value = [], values[0]
    while isinstance(value, list | bytes):
        shape.append(len(value))
        value = value[0]
    spec = replace(column_spec("c", data_type, ""), shape=tuple(shape))

    with pytest.raises(DataError, match=r"'c' holds .*null"):
        table_to_columns(table, [spec])
    # The rows before and after the null are valid.
    for good in (table.slice(0, 1), table.slice(2)):
        np.testing.assert_array_equal(table_to_columns(good, [spec])["c"][0], as_array(values[0]))


def as_array(value):
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.array(value, float)


def test_values_below_null_fixed_size_lists_are_ignored():
    """Arrow reserves space for a null's elements, which look valid in this test."""
    values = pa.array(np.arange(6))
    mask = pa.py_buffer(bytes([0b101]))
    lists = pa.Array.from_buffers(pa.list_(pa.int64(), 2), 3, [mask], children=[values])
    spec = ColumnSpec("c", "array", "int64", (2,))

    with pytest.raises(DataError, match="'c' holds 1 null"):
        table_to_columns(pa.table({"c": lists}), [spec])
    outer = pa.ListArray.from_arrays([0, 3], lists)
    with pytest.raises(DataError, match=r"'c' holds .*null"):
        table_to_columns(pa.table({"c": outer}), [ColumnSpec("c", "array", "int64", (3, 2))])
    # A slice without the null is valid.
    check(table_to_columns(pa.table({"c": lists}).slice(2), [spec])["c"], np.array([[4, 5]]))


@pytest.mark.parametrize("write_statistics", [True, False])
def test_footers_without_statistics_are_accepted(folder, write_statistics):
    table = pa.table({"x": [1.0, None, 3.0], "y": [[1], [2], [3]]})
    parquet.write_table(table, folder / "a.parquet", write_statistics=write_statistics)

    check(load(folder, "y")["y"], np.array([[1], [2], [3]]))
    with pytest.raises(DataError, match="'x' holds 1 null"):
        load(folder, "x")


@pytest.mark.parametrize("values", [[None, [1]], [[], [1]], [[None], [1]]])
def test_first_rows_without_a_shape_are_an_error(folder, values):
    rows = pa.array([values], pa.list_(pa.list_(pa.int64())))

    with pytest.raises(DataError, match="'c' holds"):
        load_one(folder, rows, write_statistics=False)
