"""Parquet files of other writers: types, from files to arrays."""

import datetime
import decimal
from dataclasses import replace

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from foreign import check, load, load_one
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.types import column_spec
from hvd_estimators.exceptions import ColumnError, DataError

pytestmark = pytest.mark.versions


PYARROW = tuple(map(int, pa.__version__.split(".")[:2]))

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SCALARS = {
    **{dtype: np.array([0, 1, 100, np.iinfo(dtype).max], dtype) for dtype in INTEGERS},
    "float32": np.array([0.1, -2.5, np.inf, 1e-30], np.float32),
    "float64": np.array([0.1, -2.5, -np.inf, 1e-300]),
    "bool": np.array([True, False, False, True]),
}
NUMBERS = np.arange(24).reshape(4, 6)
CUBES = NUMBERS.reshape(4, 2, 3)
DEEP = NUMBERS.reshape(4, 3, 1, 2)


IMAGES = (NUMBERS * 11 % 256).astype(np.uint8)


@pytest.mark.parametrize("dtype", SCALARS)
def test_scalars_of_pandas_polars_and_pyarrow_keep_values_and_dtype(folder, dtype):
    values = SCALARS[dtype]
    pd.DataFrame({"x": values}).to_parquet(folder / "pandas.parquet")
    pl.DataFrame({"x": values}).write_parquet(folder / "polars.parquet")
    parquet.write_table(pa.table({"x": values}), folder / "pyarrow.parquet")

    check(load(folder, "x")["x"], np.tile(values, 3))


@pytest.mark.parametrize("values", [NUMBERS, CUBES, DEEP], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("dtype", ["int32", "float64", "bool"])
def test_lists_of_pandas_polars_duckdb_and_pyarrow_become_one_array(folder, values, dtype):
    """Each writer has a different list type and different names for elements."""
    values = values.astype(dtype)
    rows, depth = values.tolist(), values.ndim - 1
    schema = pa.schema([("x", nested(pa.list_, pa.from_numpy_dtype(values.dtype), depth))])
    pd.DataFrame({"x": rows}).to_parquet(folder / "a.parquet", schema=schema)
    polars_type = {"int32": pl.Int32, "float64": pl.Float64, "bool": pl.Boolean}[dtype]
    polars_rows = pl.Series(rows, dtype=nested(pl.List, polars_type, depth))
    pl.DataFrame({"x": polars_rows}).write_parquet(folder / "b.parquet")
    sql_type = {"int32": "int", "float64": "double", "bool": "boolean"}[dtype] + "[]" * depth
    duck(folder / "c.parquet", " union all ".join(f"select {row}::{sql_type} as x" for row in rows))
    old = folder / "d.parquet"
    parquet.write_table(pa.table({"x": rows}, schema), old, use_compliant_nested_type=False)

    check(load(folder, "x")["x"], np.concatenate([values] * 4))


def duck(target, query, options=""):
    """Write the result of a query with DuckDB."""
    duckdb.connect().execute(f"copy ({query}) to '{target}' (format parquet{options})")


def nested(make, element, depth):
    """Return a list type of some depth."""
    for _ in range(depth):
        element = make(element)
    return element


def test_fixed_size_arrays_of_polars_and_duckdb_become_one_array(folder):
    values = pl.Series(CUBES.tolist(), dtype=pl.Array(pl.Int64, (2, 3)))
    pl.DataFrame({"x": values}).write_parquet(folder / "a.parquet")
    rows = " union all ".join(f"select {row}::bigint[3][2] as x" for row in CUBES.tolist())
    duck(folder / "b.parquet", rows)

    check(load(folder, "x")["x"], np.concatenate([CUBES, CUBES]))


def test_duckdb_numbers_keep_values_and_dtype(folder):
    duck(
        folder / "a.parquet",
        "select i::tinyint as int8, i::usmallint as uint16, i::ubigint as uint64, i / 4 as "
        "float64, (i / 4)::float as float32, i % 2 = 0 as bool, (i / 4)::decimal(10, 2) as money, "
        "i::hugeint as huge from range(4) t(i)",
    )
    found = load(folder, *["int8", "uint16", "uint64", "float64", "float32", "bool"])
    for dtype, array in found.items():
        quarters = np.arange(4) / (4 if dtype.startswith("float") else 1)
        check(array, (quarters % 2 == 0 if dtype == "bool" else quarters).astype(dtype))
    check(load(folder, "money")["money"], np.arange(4) / 4)
    # DuckDB has no wider integers in Parquet, either.
    check(load(folder, "huge")["huge"], np.arange(4.0))


LIST_TYPES = {
    "list": lambda element, width: pa.list_(element),
    "large list": lambda element, width: pa.large_list(element),
    "fixed-size list": pa.list_,
}


@pytest.mark.skipif(not hasattr(pa, "list_view"), reason="this PyArrow has no list views")
@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(2, 2)])
def test_list_views_may_overlap_and_have_any_order(rows):
    views = pa.ListViewArray.from_arrays([4, 0, 1, 2], [2, 2, 2, 2], pa.array(np.arange(6)))
    expected = np.array([[4, 5], [0, 1], [1, 2], [2, 3]])
    start, stop, _ = rows.indices(4)
    table = pa.table({"c": views}).slice(start, stop - start)

    check(table_to_columns(table, [ColumnSpec("c", "array", "int64", (2,))])["c"], expected[rows])


if hasattr(pa, "list_view"):
    LIST_TYPES["list view"] = lambda element, width: pa.list_view(element)
    LIST_TYPES["large list view"] = lambda element, width: pa.large_list_view(element)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", "float32"])
def test_dictionary_encoded_numbers_equal_plain_numbers(folder, dtype):
    values = np.array([3, 1, 3, 2], dtype)
    table = pa.table({"c": pa.array(values).dictionary_encode()})

    check(load_one(folder, table["c"]), values)
    # In memory the dictionary type is kept; files of other versions can request that, too.
    pieces = pa.concat_tables([table, pa.table({"c": pa.array(values[1:]).dictionary_encode()})])
    spec = ColumnSpec("c", "scalar", dtype)
    check(table_to_columns(pieces.slice(1), [spec])["c"], np.append(values[1:], values[1:]))


def test_dictionary_encoded_elements_and_bytes_equal_plain_ones():
    numbers = pa.ListArray.from_arrays([0, 2, 4], pa.array([7, 8, 8, 7]).dictionary_encode())
    table = pa.table({"n": numbers, "b": pa.array([b"ab", b"cd"]).dictionary_encode()})
    specs = [ColumnSpec("n", "array", "int64", (2,)), ColumnSpec("b", "array", "uint8", (2,))]

    found = table_to_columns(table, specs)

    check(found["n"], np.array([[7, 8], [8, 7]]))
    check(found["b"], np.array([[97, 98], [99, 100]], np.uint8))


def test_pandas_numeric_categories_and_nullable_types(folder):
    frame = pd.DataFrame(
        {
            "category": pd.Categorical([20, 10, 20]),
            "Int64": pd.array([1, 2, 3], "Int64"),
            "Float32": pd.array([1.5, 2, 3], "Float32"),
            "boolean": pd.array([True, False, True], "boolean"),
            "arrow": pd.array([1, 2, 3], pd.ArrowDtype(pa.uint16())),
        }
    )
    frame.to_parquet(folder / "a.parquet")

    found = load(folder, *frame.columns)

    check(found["category"], np.array([20, 10, 20]))
    check(found["Int64"], np.array([1, 2, 3]))
    check(found["Float32"], np.array([1.5, 2, 3], np.float32))
    check(found["boolean"], np.array([True, False, True]))
    check(found["arrow"], np.array([1, 2, 3], np.uint16))


@pytest.mark.skipif(PYARROW < (15, 0), reason="this PyArrow writes no 16-bit floats")
def test_polars_and_pyarrow_16_bit_floats(folder):
    values = np.array([[0.5, -1], [65504, 6e-8]], np.float16)
    pl.DataFrame({"x": values[:, 0], "y": values}).write_parquet(folder / "polars.parquet")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 2)
    table = pa.table({"x": values[:, 0], "y": lists})
    parquet.write_table(table, folder / "pyarrow.parquet")

    found = load(folder, "x", "y")

    check(found["x"], np.tile(values[:, 0], 2))
    check(found["y"], np.concatenate([values, values]))


@pytest.mark.parametrize("make", [pa.decimal128, pa.decimal256])
def test_decimals_become_64_bit_floats_even_in_lists(folder, make):
    values = [[decimal.Decimal("1.25"), decimal.Decimal("-3")], [decimal.Decimal(0)] * 2]
    expected = np.array([[1.25, -3.0], [0, 0]])

    check(load_one(folder, pa.array(values, pa.list_(make(20, 2)))), expected)
    check(load_one(folder, pa.array([row[0] for row in values], make(20, 2))), expected[:, 0])


@given(st.lists(st.decimals(-(10**9), 10**9, places=4)))
def test_decimals_become_the_nearest_float(values):
    table = pa.table({"c": pa.array(values, pa.decimal128(14, 4))})

    found = table_to_columns(table, [ColumnSpec("c", "scalar", "float64")])["c"]

    check(found, np.array([float(value) for value in values]))


BYTE_TYPES = [pa.binary(), pa.large_binary(), pa.binary(6)]


def test_polars_and_duckdb_bytes(folder):
    images = [image.tobytes() for image in IMAGES]
    pl.DataFrame({"x": images}).write_parquet(folder / "polars.parquet")
    text = " union all ".join(f"select unhex('{image.hex()}') as x" for image in images)
    duck(folder / "duckdb.parquet", text)

    check(load(folder, "x")["x"], np.concatenate([IMAGES, IMAGES]))


if hasattr(pa, "binary_view"):
    BYTE_TYPES.append(pa.binary_view())


def test_bytes_of_unequal_lengths_are_ragged(folder):
    with pytest.raises(DataError, match=r"'c' is ragged: expected 2 .*found rows of 3.*images"):
        load_one(folder, pa.array([b"ab", b"abc"]))
    table = pa.table({"c": [b"", b""]})
    with pytest.raises(DataError, match="'c' is ragged"):
        table_to_columns(table, [ColumnSpec("c", "array", "uint8", (2,))])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a"], "string.*StringIndexer"),
        (pa.array(["a"], pa.large_string()), "large_string.*StringIndexer"),
        ([["a"]], r"list<\w+: string>.*StringIndexer"),
        (pa.array(["a"]).dictionary_encode(), r"dictionary<.*cat\.codes"),
        ([datetime.date(2024, 1, 1)], "date32.*store a number"),
        ([datetime.datetime(2024, 1, 1)], "timestamp.*store a number"),
        (pa.array([1], pa.duration("us")), "duration.*store a number"),
        ([datetime.time(1)], "time64.*store a number"),
        ([{"a": 1}], "struct<a: int64>.*separate columns"),
        ([[{"a": 1}]], "list<.*separate columns"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "map<.*separate columns"),
    ],
)
def test_errors_about_other_types_name_the_type_and_a_remedy(folder, values, words):
    with pytest.raises(ColumnError, match=rf"Column 'c' has type {words}.*or leave it out"):
        load_one(folder, values)


@given(
    rows=st.integers(1, 7),
    shape=st.lists(st.integers(1, 3), max_size=3),
    kinds=st.lists(st.sampled_from(sorted(LIST_TYPES)), min_size=3, max_size=3),
    cuts=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    chunks=st.integers(1, 3),
    dtype=st.sampled_from(["int16", "float64", "bool"]),
)
def test_arrays_of_any_shape_in_any_lists_survive_slices_and_chunks(
    rows, shape, kinds, cuts, chunks, dtype
):
    values = (np.arange(rows * int(np.prod(shape))) % 5).reshape(rows, *shape).astype(dtype)
    data_type = pa.from_numpy_dtype(values.dtype)
    for width, kind in zip(reversed(shape), kinds, strict=False):
        data_type = LIST_TYPES[kind](data_type, width)
    pieces = [pa.array(values.tolist(), data_type) for _ in range(chunks)]
    start, stop = min(cuts), max(cuts)
    spec = ColumnSpec("c", "array" if shape else "scalar", dtype, tuple(shape))

    found = table_to_columns(
        pa.table({"c": pa.chunked_array(pieces)}).slice(start, stop - start), [spec]
    )["c"]

    check(found, np.concatenate([values] * chunks)[start:stop])


@pytest.mark.parametrize("data_type", BYTE_TYPES, ids=str)
@given(data=st.data(), start=st.integers(0, 9), chunks=st.integers(1, 3))
def test_bytes_of_any_slice_and_chunks_agree_with_numpy(data_type, data, start, chunks):
    width = 6  # that of the fixed type
    rows = data.draw(st.lists(st.binary(min_size=width, max_size=width)))
    column = pa.chunked_array([pa.array(rows, data_type)] * chunks, data_type)
    spec = ColumnSpec("c", "array", "uint8", (width,))
    found = table_to_columns(pa.table({"c": column}).slice(start), [spec])["c"]
    expected = np.frombuffer(b"".join((rows * chunks)[start:]), np.uint8)
    check(found, expected.reshape(-1, width))


@pytest.mark.parametrize(
    "values",
    [
        pa.array(np.arange(8.0)),
        pa.array(np.arange(8).tolist(), pa.uint16()),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8)), 2),
        pa.array([[1, 2], [3, 4]]),
        pa.array([b"abc", b"def"]),
        pa.array([b"abc", b"def"], pa.binary(3)),
    ],
    ids=str,
)
def test_numbers_are_not_copied(values):
    row = values[0].as_py()
    shape = (len(row),) if isinstance(row, list | bytes) else ()
    spec = replace(column_spec("c", values.type, ""), shape=shape)

    found = table_to_columns(pa.table({"c": values}), [spec])["c"]

    addresses = [buffer.address for buffer in values.buffers() if buffer is not None]
    assert found.__array_interface__["data"][0] in addresses
