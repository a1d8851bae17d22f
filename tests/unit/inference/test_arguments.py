"""What a UDF is called with in SQL, as it comes to pandas."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest

from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.inference.arguments import in_columns_form

pytestmark = pytest.mark.versions


def column(given: Any) -> pd.Series:
    return in_columns_form([given], ["a"], [])[0]


def vectors(*rows: tuple[Any, ...]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=["type", "size", "indices", "values"])


def test_vectors_are_arrays_of_floats_dense_or_sparse() -> None:
    dense = (1.0, np.nan, None, np.array([1.5, 0.1]))
    sparse = (0.0, 2.0, np.array([1], np.int32), np.array([3.0]))
    none = (np.nan, np.nan, None, None)
    found = column(vectors(dense, none, sparse)).tolist()
    assert found[1] is None
    assert [found[0].tolist(), found[2].tolist()] == [[1.5, np.float32(0.1)], [0.0, 3.0]]
    assert {found[0].dtype, found[2].dtype} == {np.dtype("float32")}
    # As all of them, PyArrow gives the kinds as whole numbers.
    assert column(vectors(dense).astype({"type": "int8"})).iloc[0].tolist() == found[0].tolist()
    with pytest.raises(DataError, match="'a' is ragged"):
        column(vectors(sparse, (1.0, np.nan, None, np.ones(3))))


def test_decimals_are_floats_also_in_arrays_of_arrays() -> None:
    assert column(pd.Series([None, Decimal("0.25")])).tolist()[1] == 0.25
    inner = np.array([Decimal(1), Decimal("2.5")], dtype=object)
    outer = np.empty(1, dtype=object)
    outer[0] = inner
    found = column(pd.Series([None, outer]))
    assert found.iloc[0] is None
    assert found.iloc[1][0].dtype == np.float64
    assert found.iloc[1][0].tolist() == [1, 2.5]
    numbers = pd.Series([1, 2])
    assert column(numbers) is numbers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (pd.Series(["text"]), "'a' holds text"),
        (pd.Series([b"bytes"]), "'a' holds bytes"),
        (pd.Series([datetime.date(2020, 1, 1)]), "'a' holds values of type date"),
        (pd.Series([pd.Timestamp(0)]), "'a' holds dates or times"),
        (pd.Series([{"key": 1}]), "'a' holds values of type dict"),
        (pd.DataFrame({"x": [1], "y": [2]}), "'a' is a struct of x, y"),
    ],
)
def test_what_is_no_number_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        column(given)


def test_text_passes_where_it_may_be_and_counts_are_checked() -> None:
    text = pd.Series(["text", None])
    assert in_columns_form([text], ["a"], ["a"])[0] is text
    with pytest.raises(ParamError, match="takes 2 columns, a, b, found 1"):
        in_columns_form([text], ["a", "b"], [])
