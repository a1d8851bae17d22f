"""Conversion of Arrow tables to NumPy arrays."""

import numpy as np
import pyarrow as pa
import pytest

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import DataError

pytestmark = pytest.mark.versions


def convert(table, *specs):
    return table_to_columns(table, specs)


def only(table, spec):
    return table_to_columns(table, [spec])[spec.name]


@pytest.mark.parametrize("lists", [pa.list_(pa.int32()), pa.list_(pa.int32(), 3)])
def test_empty_tables_become_empty_arrays(lists):
    schema = pa.schema([("x", pa.float32()), ("y", lists)])

    arrays = convert(
        schema.empty_table(),
        ColumnSpec("x", "scalar", "float32"),
        ColumnSpec("y", "array", "int32", (3,)),
    )

    assert arrays["x"].shape == (0,)
    assert arrays["y"].shape == (0, 3)
    assert arrays["y"].dtype == np.int32


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


def _nested(depth):
    data_type = pa.int64()
    for _ in range(depth):
        data_type = pa.list_(data_type)
    return data_type
