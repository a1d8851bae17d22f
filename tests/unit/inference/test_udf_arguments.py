"""Arguments of a UDF in SQL, in batches."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hvd_estimators.data.arrays import to_array
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.inference.batch import to_arrays
from hvd_estimators.inference.udf import sql_arguments

pytestmark = pytest.mark.versions


def column(given: pa.Array) -> pa.Array:
    return sql_arguments([given], ["a"], [])[0]


def to_arrays_of(given: pa.Array) -> Any:
    found, valid = to_arrays(["a"], [given], keeps_nulls=True)
    return found["a"], valid


def vectors(*rows: Any) -> pa.Array:
    numbers = {"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    return pa.array(list(rows), pa.struct({"type": pa.int8(), "size": pa.int32(), **numbers}))


def test_vectors_are_arrays_of_floats_dense_or_sparse() -> None:
    dense = {"type": 1, "values": [1.5, 0.1]}
    sparse = {"type": 0, "size": 2, "indices": [1], "values": [3.0]}
    found = to_array(column(vectors(dense, sparse)), "a")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([[1.5, 0.1], [0.0, 3.0]], np.float32))
    with pytest.raises(DataError, match="'a' is ragged"):
        to_array(column(vectors(sparse, {"type": 1, "values": [1.0] * 3})), "a")


def test_decimals_become_floats_even_in_nested_arrays() -> None:
    found = to_array(column(pa.array([Decimal("0.25")])), "a")
    assert (found.dtype, found.tolist()) == (np.float64, [0.25])
    found = to_array(column(pa.array([[[Decimal(1), Decimal("2.5")]]])), "a")
    assert (found.dtype, found.tolist()) == (np.float64, [[[1.0, 2.5]]])
    (found,), valid = to_arrays_of(column(pa.array([None, [Decimal("0.25")]])))
    assert (found.tolist(), valid.tolist()) == ([0.25], [False, True])
    numbers = pa.array([1, 2])
    assert column(numbers) is numbers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["text"], "'a' has type string"),
        ([["text"]], "'a' has type list"),
        ([b"bytes"], "'a' has type binary"),
        ([datetime.date(2020, 1, 1)], "'a' has type date32"),
        ([datetime.datetime(2020, 1, 1)], "'a' has type timestamp"),
        ([{"x": 1, "y": 2}], "'a' has type struct<x: int64, y: int64>"),
    ],
)
def test_other_types_are_rejected(given: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        column(pa.array(given))


def test_text_is_accepted_if_allowed_and_the_count_is_checked() -> None:
    text = pa.array(["text", None])
    assert sql_arguments([text], ["a"], ["a"])[0] is text
    with pytest.raises(ParamError, match="takes 2 columns, a, b, found 1"):
        sql_arguments([text], ["a", "b"], [])
