"""Arrow columns for a UDF, even in a PySpark that would convert them to pandas."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.inference import udf
from hvd_estimators.inference.batch import BatchPredictor
from hvd_estimators.inference.udf import has_arrow_udfs, make_udf

pytestmark = pytest.mark.versions

LISTS = pa.array([[1.0, 2.0], None])


def convert(column: Any) -> Any:
    if has_arrow_udfs():
        pytest.skip("this PySpark has Arrow UDFs")
    serializers = pytest.importorskip("pyspark.sql.pandas.serializers")
    make = serializers.ArrowStreamPandasUDFSerializer
    return make("UTC", True, True, df_for_struct=True).arrow_to_pandas(column)


def test_this_pyspark_can_pass_arrow_columns() -> None:
    assert has_arrow_udfs() == hasattr(F, "arrow_udf")
    assert has_arrow_udfs() or callable(udf._serializer().arrow_to_pandas)


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_columns_are_not_converted_within_the_block(num_chunks: int) -> None:
    column = pa.chunked_array([LISTS] * num_chunks, LISTS.type)
    before = convert(column)
    with udf._unconverted():
        found = convert(column)
    assert isinstance(before, pd.Series)
    assert isinstance(found, pa.Array)
    assert found.to_pylist() == LISTS.to_pylist() * num_chunks
    with pytest.raises(ZeroDivisionError), udf._unconverted():
        raise ZeroDivisionError
    assert isinstance(convert(column), pd.Series)


@pytest.mark.parametrize("missing", ["_MODULE", "_SERIALIZER", "_CONVERT"])
def test_a_pyspark_without_arrow_columns_is_an_error(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(udf, missing, "there_is_none")
    monkeypatch.setattr(udf, "has_arrow_udfs", lambda: False)
    steps = BatchPredictor(("x",), InputColumns.of(["x"]), shapes=((),))
    with pytest.raises(DependencyError, match=r"Arrow's format.* Install PySpark 3\.5"):
        make_udf(b"", lambda document: pytest.fail("it is not called"), steps, pytest.fail, [])
