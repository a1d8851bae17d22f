"""Arrow's columns for a UDF where PySpark would make pandas' of them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from hvd_estimators.inference import arrow_columns
from hvd_estimators.inference.arrow_columns import (
    can_leave_unconverted,
    sees_arrow,
    takes_arrow,
    unconverted,
)

LISTS = pa.array([[1.0, 2.0], None])


def convert(column: Any) -> Any:
    serializers = pytest.importorskip("pyspark.sql.pandas.serializers")
    make = getattr(serializers, "ArrowStreamPandasUDFSerializer", None)
    if make is None:
        pytest.skip("this PySpark has Arrow UDFs")
    return make("UTC", True, True, df_for_struct=True).arrow_to_pandas(column)


def test_this_pyspark_gives_arrows_columns_in_one_way_or_the_other() -> None:
    assert takes_arrow() == hasattr(F, "arrow_udf")
    assert sees_arrow()
    assert can_leave_unconverted() or takes_arrow()


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_columns_are_left_as_they_are_and_converted_again_behind_it(num_chunks: int) -> None:
    column = pa.chunked_array([LISTS] * num_chunks, LISTS.type)
    before = convert(column)
    with unconverted():
        found = convert(column)
    assert isinstance(before, pd.Series)
    assert isinstance(found, pa.Array)
    assert found.to_pylist() == LISTS.to_pylist() * num_chunks
    with pytest.raises(ZeroDivisionError), unconverted():
        raise ZeroDivisionError
    assert isinstance(convert(column), pd.Series)


@pytest.mark.parametrize("missing", ["_MODULE", "_SERIALIZER", "_CONVERT"])
def test_a_pyspark_without_the_method_goes_on_as_it_does(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(arrow_columns, missing, "there_is_none")
    assert not can_leave_unconverted()
    assert sees_arrow() == takes_arrow()
    with unconverted():
        pass
