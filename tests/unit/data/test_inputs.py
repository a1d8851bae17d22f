"""Inputs of a model: their names, and matrices of several columns compared with NumPy."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.manifest import ColumnSpec, stored_names
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.params import input_columns
from hvd_estimators.torch import TorchEstimator

ROWS = 7
SPECS = [
    ColumnSpec("whole", "scalar", "int32"),
    ColumnSpec("flag", "scalar", "bool"),
    ColumnSpec("half", "scalar", "float32"),
    ColumnSpec("exact", "scalar", "float64"),
    ColumnSpec("day", "partition", "int64"),
    ColumnSpec("image", "array", "float32", (2,)),
]
TABLE = pa.table(
    {
        "whole": pa.array(range(-3, 4), pa.int32()),
        "flag": [i % 2 == 0 for i in range(ROWS)],
        "half": pa.array([0.5, np.nan, 2, 3, 4, 5, 6], pa.float32()),
        "exact": pa.array([decimal.Decimal(i) / 8 for i in range(ROWS)], pa.decimal128(9, 3)),
        "image": pa.array([[float(i), 0.0] for i in range(ROWS)], pa.list_(pa.float32())),
    }
)


def expected(*names: str) -> np.ndarray:
    columns = {**TABLE.to_pydict(), "day": [5] * ROWS}
    return np.array([[float(columns[name][row]) for name in names] for row in range(ROWS)])


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("whole", "flag"), "int32"),
        (("flag",), "bool"),
        (("half", "flag"), "float32"),
        (("whole", "half"), "float64"),
        (("exact", "day", "half", "whole", "flag"), "float64"),
    ],
)
def test_matrices_have_the_common_type(names: tuple[str, ...], dtype: str) -> None:
    inputs = InputColumns.of([list(names), "image"], kept=["half"])
    specs = inputs.specs(SPECS)
    assert stored_names(specs).count("half") == 1
    read = table_to_columns(TABLE, specs, "folder/day=5/rows.parquet")
    columns = table_to_columns(TABLE, SPECS, "folder/day=5/rows.parquet")
    for arrays in (read, inputs.stack(columns)):
        # A column that is also needed alone stays.
        assert list(arrays) == [
            *(s.name for s in SPECS if s.name not in names or s.name == "half"),
            "features",
        ]
        assert arrays["features"].dtype == dtype
        np.testing.assert_array_equal(arrays["features"], expected(*names))
        assert arrays["features"].shape == (ROWS, *specs[-1].shape)


def test_inputs_are_named() -> None:
    given = input_columns("feature_cols", ["x", ("a", "b"), {"sizes": ["c"]}, ["d"]])
    assert given == ["x", ["a", "b"], {"sizes": ["c"]}, ["d"]]
    inputs = InputColumns.of(given)
    assert inputs.names == ("x", "features_0", "sizes", "features_1")
    assert inputs.columns == ("x", "a", "b", "c", "d")
    assert InputColumns.of([["a", "b"]]).names == ("features",)
    estimator = TorchEstimator(feature_cols=[["a", "b"]])
    assert estimator.getFeatureCols() == [["a", "b"]]
    assert estimator.getFeaturesCol() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([["a", "b", "a"]], "'a' more than once"),
        ([["a", "b"], "b"], "'b' more than once"),
        ([["a", "b"], {"n": ["b"]}], "'b' more than once"),
        ([["a", ["b"]]], "expected names of columns"),
        ([[]], r"expected names of columns, found \[\]"),
        ([{"n": []}], "expected names of columns, found"),
        ([{"n": ["a"], "m": ["b"]}], "whose order counts"),
        ([{"a", "b"}], "whose order counts"),
        ([["a", "b"], "features"], "expected inputs with different names"),
        ([{"n": ["a"]}, {"n": ["b"]}], "expected inputs with different names"),
    ],
)
def test_wrong_lists_are_rejected(given: Any, message: str) -> None:
    with pytest.raises(ParamError, match=f"^feature_cols: .*{message}"):
        TorchEstimator(feature_cols=given)


def test_columns_that_are_not_numbers_are_rejected() -> None:
    inputs = InputColumns.of([["whole", "image"]])
    message = r"expected one number per row in each column of \[\"whole\", \"image\"\].*\(2,\)"
    with pytest.raises(ColumnError, match=message):
        inputs.specs(SPECS)
    with pytest.raises(ColumnError, match=message):
        inputs.stack(table_to_columns(TABLE, [SPECS[0], SPECS[5]]))
    with pytest.raises(ColumnError, match="no column 'whole'"):
        inputs.specs(SPECS[1:])
    with pytest.raises(ColumnError, match="no column 'whole'"):
        inputs.stack({"image": np.zeros(3)})
    with_null = TABLE.set_column(0, "whole", pa.array([None, *range(6)], pa.int32()))
    with pytest.raises(DataError, match="Column 'whole' holds 1 nulls"):
        table_to_columns(with_null, InputColumns.of([["whole", "flag"]]).specs(SPECS[:2]))
