"""Predictions on columns of every kind, compared with the model in this process."""

from __future__ import annotations

import decimal
import functools
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import DenseVector, Vectors, VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from hvd_estimators.inference.udf import has_arrow_udfs, vector_parts
from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.versions]

ROWS = 40
SCALARS = {
    "a_byte": T.ByteType(),
    "a_short": T.ShortType(),
    "an_int": T.IntegerType(),
    "a_long": T.LongType(),
    "a_float": T.FloatType(),
    "a_double": T.DoubleType(),
    "a_decimal": T.DecimalType(8, 3),
    "a_boolean": T.BooleanType(),
}
VECTORS = {
    "dense": VectorUDT(),
    "sparse": VectorUDT(),
    "mixed": VectorUDT(),
    "floats": T.ArrayType(T.FloatType(), False),
    "doubles": T.ArrayType(T.DoubleType()),
    "longs": T.ArrayType(T.LongType()),
    "booleans": T.ArrayType(T.BooleanType()),
    "decimals": T.ArrayType(T.DecimalType(8, 3)),
}
NESTED = {
    "matrix": T.ArrayType(T.ArrayType(T.DoubleType())),
    "ints": T.ArrayType(T.ArrayType(T.IntegerType(), False), False),
    "cube": T.ArrayType(T.ArrayType(T.ArrayType(T.FloatType()))),
}
SHAPES = {
    **dict.fromkeys(SCALARS, ()),
    **dict.fromkeys(VECTORS, (3,)),
    **{"matrix": (2, 3), "ints": (2, 3), "cube": (2, 1, 3)},
}
DTYPES = {"a_long": "float64", "a_double": "float64", "longs": "float64", "matrix": "float64"}


def as_spark(data_type: T.DataType, value: Any, dense: bool) -> Any:
    if isinstance(data_type, T.ArrayType):
        return [as_spark(data_type.elementType, entry, dense) for entry in value]
    if isinstance(data_type, VectorUDT):
        given = {i: v for i, v in enumerate(value) if v}
        return Vectors.dense(value) if dense else Vectors.sparse(len(value), given)
    if isinstance(data_type, T.DecimalType):
        return decimal.Decimal(str(round(float(value), 3)))
    whole = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
    if isinstance(data_type, whole):
        return int(value)
    return value > 0 if isinstance(data_type, T.BooleanType) else float(value)


def as_number(value: Any) -> Any:
    if isinstance(value, list):
        return [as_number(entry) for entry in value]
    return value.toArray().tolist() if hasattr(value, "toArray") else float(value)


@pytest.fixture(scope="module")
def rows(spark: Any) -> DataFrame:
    """Return rows in partitions of 0, 1, 10 and 29 rows."""
    rng = np.random.default_rng(0)
    types = {**SCALARS, **VECTORS, **NESTED}
    values = []
    for index in range(ROWS):
        row = []
        for name, data_type in types.items():
            value = rng.normal(scale=9, size=SHAPES[name]) * (rng.random(SHAPES[name]) < 0.8)
            dense = name == "dense" or (name == "mixed" and index % 3 == 0)
            row.append(as_spark(data_type, value.tolist(), dense))
        values.append((index, *row))
    fields = [T.StructField(name, data_type) for name, data_type in types.items()]
    schema = T.StructType([T.StructField("id", T.LongType()), *fields])
    frame = spark.createDataFrame(values, schema).cache()
    parts = [frame.where(f"id >= {a} and id < {b}") for a, b in [(0, 0), (0, 1), (1, 11), (11, 40)]]
    return functools.reduce(DataFrame.union, [part.coalesce(1) for part in parts])


class Together(torch.nn.Module):
    """Return a number, a vector and a matrix in which every column has a different weight."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, *given: Any, **named: Any) -> Any:
        if given:
            by_name = isinstance(given[0], dict)
            named = given[0] if by_name else dict(zip(SHAPES, given, strict=True))
        number = sum((i + 1) * named[name].double() for i, name in enumerate(SCALARS))
        vector = sum((i + 1) * named[name].double() for i, name in enumerate(VECTORS))
        matrix = named["matrix"] + 2 * named["ints"].double() + 3 * named["cube"].double()[:, :, 0]
        found = {"a number": number, "a vector": vector, "matrix": matrix}
        return found if self.returns == "dict" else tuple(found.values())


@pytest.mark.parametrize(
    ("form", "returns", "batch_rows"),
    [("positional", "tuple", 1), ("keyword", "dict", 7), ("dict", "tuple", 1024)],
)
def test_predictions_match_the_model(
    spark: Any, rows: DataFrame, form: str, returns: str, batch_rows: int
) -> None:
    model = TorchModel(
        model=Together(returns),
        feature_columns=list(SHAPES),
        label_columns=["a number", "a vector", "matrix"],
        input_form=form,
        input_shapes=[[-1, *shape] for shape in SHAPES.values()],
        output_shapes=[[], [3], [2, 3]],
        column_dtypes=DTYPES,
        inference_batch_size=batch_rows,
    )
    predicted = model.transform(rows)
    found = predicted.collect()
    assert predicted.drop(*model.getOutputCols()).schema == rows.schema

    assert [row["id"] for row in found] == list(range(ROWS))
    inputs = {
        name: torch.tensor(
            [as_number(row[name]) for row in found],
            dtype=getattr(torch, DTYPES.get(name, "float32")),
        )
        for name in SHAPES
    }
    with torch.no_grad():
        outputs = list(Together("tuple")(**inputs))
    columns = [
        [row[f"{name}__output"] for row in found] for name in ("a number", "a vector", "matrix")
    ]
    np.testing.assert_array_equal(columns[0], outputs[0])
    np.testing.assert_array_equal([vector.toArray() for vector in columns[1]], outputs[1])
    np.testing.assert_array_equal(columns[2], outputs[2])


def test_vectors_are_sent_as_stored(rows: DataFrame) -> None:
    """Send no null lists to Arrow UDFs: their cost grows with the row's place in the batch."""
    none = [] if has_arrow_udfs() else None
    nullable = rows.select(F.when(F.col("id") % 5 > 0, F.col("mixed")).alias("mixed"), "id")
    sent = nullable.select(vector_parts(F.col("mixed")).alias("parts"), "mixed").collect()

    assert {row.mixed is None for row in sent} == {True, False}
    for parts, vector in sent:
        if vector is None:
            assert parts is None
        elif isinstance(vector, DenseVector):
            assert (parts.type, parts.indices) == (1, none)
            assert parts["values"] == vector.toArray().tolist()
        else:
            assert (parts.type, parts.size, parts.indices) == (0, 3, vector.indices.tolist())
            assert parts["values"] == vector.values.tolist()
