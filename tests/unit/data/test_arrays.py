"""Conversion of Arrow tables to NumPy arrays."""

import numpy as np
import pyarrow as pa
import pytest

from hvd_estimators.data.arrays import num_rows, table_to_columns, take
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import DataError

pytestmark = pytest.mark.versions

DTYPES = ["int8", "int16", "int32", "int64", "uint8", "float32", "float64", "bool"]


def convert(table, *specs):
    return table_to_columns(table, specs)


def only(table, spec):
    return table_to_columns(table, [spec])[spec.name]


@pytest.fixture(params=["list", "large_list", "fixed_size_list"])
def list_of(request):
    """Return a function that builds the list type of a given width."""

    def make(element, width):
        if request.param == "fixed_size_list":
            return pa.list_(element, width)
        return pa.large_list(element) if request.param == "large_list" else pa.list_(element)

    return make


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_keep_their_values_and_dtype(dtype):
    values = np.array([0, 1, 1, 0, 1], dtype=dtype)
    table = pa.table({"x": pa.array(values)})

    array = only(table, ColumnSpec("x", "scalar", dtype))

    assert array.dtype == values.dtype
    np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_become_a_matrix_with_the_elements_dtype(list_of, dtype):
    values = np.arange(12).reshape(4, 3).astype(dtype)
    data_type = list_of(pa.from_numpy_dtype(values.dtype), 3)
    table = pa.table({"x": pa.array(values.tolist(), data_type)})

    array = only(table, ColumnSpec("x", "array", dtype, (3,)))

    assert array.dtype == values.dtype
    np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 5), (4, 7), (3, 3)])
def test_slices_of_a_table_become_slices_of_its_arrays(list_of, start, stop):
    values = np.arange(14.0).reshape(7, 2)
    cubes = np.arange(42).reshape(7, 2, 3)
    table = pa.table(
        {
            "number": values[:, 0],
            "flag": values[:, 0] % 3 == 0,
            "list": pa.array(values.tolist(), list_of(pa.float64(), 2)),
            "cube": pa.array(cubes.tolist(), list_of(list_of(pa.int64(), 3), 2)),
        }
    )

    arrays = convert(
        table.slice(start, stop - start),
        ColumnSpec("number", "scalar", "float64"),
        ColumnSpec("flag", "scalar", "bool"),
        ColumnSpec("list", "vector", "float64", (2,)),
        ColumnSpec("cube", "array", "int64", (2, 3)),
    )

    np.testing.assert_array_equal(arrays["number"], values[start:stop, 0])
    np.testing.assert_array_equal(arrays["flag"], values[start:stop, 0] % 3 == 0)
    np.testing.assert_array_equal(arrays["list"], values[start:stop])
    np.testing.assert_array_equal(arrays["cube"], cubes[start:stop])


def test_chunks_of_a_column_are_concatenated(list_of):
    values = np.arange(10).reshape(5, 2)
    data_type = list_of(pa.int64(), 2)
    chunks = [pa.array(values[rows].tolist(), data_type) for rows in ([0, 1], [], [2], [3, 4])]
    table = pa.table({"x": pa.chunked_array(chunks)})

    np.testing.assert_array_equal(only(table, ColumnSpec("x", "array", "int64", (2,))), values)
    # The slice starts inside the first chunk and ends inside the last.
    np.testing.assert_array_equal(
        only(table.slice(1, 3), ColumnSpec("x", "array", "int64", (2,))), values[1:4]
    )


def test_empty_tables_become_empty_arrays(list_of):
    schema = pa.schema([("x", pa.float32()), ("y", list_of(pa.int32(), 3))])

    arrays = convert(
        schema.empty_table(),
        ColumnSpec("x", "scalar", "float32"),
        ColumnSpec("y", "array", "int32", (3,)),
    )

    assert arrays["x"].shape == (0,)
    assert arrays["y"].shape == (0, 3)
    assert arrays["y"].dtype == np.int32


def test_triply_nested_lists_become_four_dimensional_arrays(list_of):
    values = np.arange(48, dtype=np.float32).reshape(3, 2, 4, 2)
    data_type = list_of(list_of(list_of(pa.float32(), 2), 4), 2)
    table = pa.table({"x": pa.array(values.tolist(), data_type)})

    array = only(table, ColumnSpec("x", "array", "float32", (2, 4, 2)))

    np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5), slice(1, 1)])
def test_sparse_columns_equal_the_dense_matrix(rows):
    dense = np.array(
        [[0, 1.5, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, -1], [0, 0, 0, 0]], np.float32
    )
    places = [np.flatnonzero(row) for row in dense]
    table = pa.table(
        {
            "x__indices": pa.array([place.tolist() for place in places], pa.list_(pa.int32())),
            "x__values": pa.array(
                [row[place].tolist() for row, place in zip(dense, places, strict=True)],
                pa.list_(pa.float32()),
            ),
        }
    )
    start, stop, _ = rows.indices(len(dense))

    array = only(table.slice(start, stop - start), ColumnSpec("x", "sparse", "float32", (4,)))

    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, dense[rows])


@pytest.mark.parametrize(
    ("values", "spec"),
    [
        ([1.0, None], ColumnSpec("price", "scalar", "float64")),
        ([True, None], ColumnSpec("price", "scalar", "bool")),
        ([[1.0], None], ColumnSpec("price", "array", "float64", (1,))),
        ([[1.0, None], [1.0, 2.0]], ColumnSpec("price", "array", "float64", (2,))),
        ([[[1.0], None], [[1.0], [2.0]]], ColumnSpec("price", "array", "float64", (2, 1))),
        ([[[1.0], [None]], [[1.0], [2.0]]], ColumnSpec("price", "array", "float64", (2, 1))),
    ],
)
def test_errors_about_nulls_name_the_column(values, spec):
    with pytest.raises(DataError, match=r"'price' holds .*null"):
        only(pa.table({"price": values}), spec)


@pytest.mark.parametrize("missing", ["indices", "values"])
def test_errors_about_null_rows_name_the_sparse_column(missing):
    columns = {"indices": [[0], [1]], "values": [[2.0], [3.0]]}
    columns[missing][1] = None
    table = pa.table({f"x__{name}": values for name, values in columns.items()})

    with pytest.raises(DataError, match="'x"):
        only(table, ColumnSpec("x", "sparse", "float64", (2,)))


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([[1, 2], [3]], (2,)),
        ([[1, 2], [3, 4, 5]], (2,)),
        ([[1], [2, 3], [4, 5, 6]], (2,)),  # the right number of elements for the shape
        ([[1, 2], [3, 4]], (3,)),
        ([[], []], (1,)),
        ([[[1, 2], [3, 4]], [[5, 6]]], (2, 2)),
        ([[[1, 2], [3, 4]], [[5, 6, 7], [8]]], (2, 2)),  # ragged only inside a row
    ],
)
def test_errors_about_lengths_of_rows_name_the_column(values, shape):
    table = pa.table({"pixels": pa.array(values, _nested(len(shape)))})

    with pytest.raises(DataError, match="'pixels' is ragged"):
        only(table, ColumnSpec("pixels", "array", "int64", shape))


def test_columns_follow_the_order_of_the_specs():
    table = pa.table({"a": [1], "b": [2], "c": [3]})

    arrays = convert(table, ColumnSpec("c", "scalar", "int64"), ColumnSpec("a", "scalar", "int64"))

    assert list(arrays) == ["c", "a"]


def test_rows_can_be_counted_and_selected():
    whole = {"x": np.array([1, 2, 3]), "y": np.array([[1, 0], [0, 1], [1, 1]])}

    assert num_rows(whole) == 3
    picked = take(whole, np.array([2, 0]))
    np.testing.assert_array_equal(picked["x"], [3, 1])
    np.testing.assert_array_equal(picked["y"], [[1, 1], [1, 0]])


def _nested(depth):
    data_type = pa.int64()
    for _ in range(depth):
        data_type = pa.list_(data_type)
    return data_type
