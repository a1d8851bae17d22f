"""Predictions of as_udf() in SQL and in expressions, compared with transform()."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import Noting
from pyspark.ml.linalg import Vectors
from pyspark.sql import Row
from pyspark.sql import functions as F

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.versions]


class Sums(torch.nn.Module):
    """Return three outputs: a number, a vector and a matrix."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = torch.cat([x.reshape(len(x), -1).float() for x in inputs], 1)
        return flat.sum(1), flat[:, :2], torch.stack([flat[:, :2], -flat[:, :2]], 1)


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    """Return rows with a column of each kind, named by its kind."""
    values = [
        (
            i,
            Vectors.dense([i, 2.5]) if i % 2 else Vectors.sparse(2, [1], [float(i)]),
            Vectors.dense([i, 0.1]),
            [i, -i],
            [[float(i), 1.0], [2.0, 3.0]],
            decimal.Decimal(i) / 4,
            [decimal.Decimal(i) / 4, decimal.Decimal(1)],
            i % 3 == 0,
        )
        for i in range(7)
    ]
    names = ["id", "mixed", "dense", "array", "nested", "decimal", "decimals", "flag"]
    frame = spark.createDataFrame(values, names).coalesce(1)
    frame = frame.withColumn("float", F.col("id").cast("float") / 3)
    frame.createOrReplaceTempView("rows")
    return frame.cache()


KINDS = ("id", "mixed", "dense", "array", "nested", "decimal", "decimals", "flag", "float")


def make_model(module: torch.nn.Module, features: list[str], outputs: list[str]) -> TorchModel:
    return TorchModel(
        model=module,
        feature_columns=features,
        outputCols=outputs,
        label_columns=outputs,
        output_shapes=[[], [2], [2, 2]][: len(outputs)],
        inference_batch_size=2,
    )


def plain(value: Any) -> Any:
    return value.toArray().tolist() if hasattr(value, "toArray") else value


def test_udfs_match_transform_on_all_kinds_of_columns(spark: Any, rows: Any) -> None:
    names = ["sum", "a vector", "the.matrix"]
    model = make_model(Sums(), [*KINDS], names)
    predicted = model.transform(rows).collect()
    expected = {row["id"]: [plain(row[name]) for name in names] for row in predicted}
    udf = model.as_udf("my_model")
    in_sql = spark.sql(f"select id, my_model({', '.join(KINDS)}) as made from rows")
    in_expression = rows.select("id", udf(*KINDS).alias("made"))
    for frame in (in_sql, in_expression):
        assert frame.schema["made"].dataType.fieldNames() == names
        assert {row["id"]: [*row["made"]] for row in frame.collect()} == expected


def test_a_nondeterministic_udf_runs_once_under_a_filter(
    spark: Any, rows: Any, tmp_path: Path
) -> None:
    noted = tmp_path / "rows"
    udf = make_model(Noting(noted), ["id"], ["y"]).as_udf().asNondeterministic()
    spark.udf.register("once", udf)
    query = "select id, y from (select id, once(id) as y from rows) where y >= 0"
    assert sorted(map(tuple, spark.sql(query).collect())) == [(i, float(i)) for i in range(7)]
    assert sum(map(int, noted.read_text().split())) == 7


def test_results_have_the_given_output_types(spark: Any, rows: Any) -> None:
    model = make_model(Sums(), ["nested"], ["sum", "two", "four"])
    model.setOutputTypes(["int", "array<float>", "array<array<bigint>>"]).as_udf("typed")
    by_udf = spark.sql("select made.* from (select typed(nested) made from rows where id = 3)")
    by_transform = model.transform(rows.where("id = 3")).select("sum", "two", "four")
    assert [type(f.dataType) for f in by_udf.schema] == [
        type(f.dataType) for f in by_transform.schema
    ]
    assert by_udf.collect() == by_transform.collect()
    for types in (["array<int>", None, None], [None, "float", None], [None, None, "array<double>"]):
        with pytest.raises(ParamError, match=r"output_types: a row of .* expected a type like"):
            model.setOutputTypes(types).as_udf()


def test_nulls_give_nulls_or_an_error(spark: Any, rows: Any) -> None:
    kinds = ["mixed", "nested", "decimal", "float"]
    nulls = rows.where("id < 5").coalesce(1)
    for number, kind in enumerate(kinds):
        nulls = nulls.withColumn(kind, F.when(F.col("id") != number, F.col(kind)))
    model = make_model(Sums(), kinds, ["sum", "two", "four"])
    # A UDF cannot skip rows.
    udf = model.setHandleInvalid("skip").as_udf()
    found = {
        row["id"]: row["made"] for row in nulls.select("id", udf(*kinds).alias("made")).collect()
    }
    of_rest = rows.where("id = 4").select(udf(*kinds).alias("made")).collect()
    assert found.pop(4) == of_rest[0]["made"]
    assert found == dict.fromkeys(range(4), Row(sum=None, two=None, four=None))
    with pytest.raises(Exception, match="Column 'mixed' holds nulls"):
        nulls.select(model.setHandleInvalid("error").as_udf()(*kinds)).collect()


class Lengths(LightningModel):
    """Predict the length of a text."""

    def get_prediction_fn(self) -> Any:
        return lambda module, row: torch.tensor([float(len(row.word))])


def test_prediction_functions_and_transformations_accept_text(spark: Any, rows: Any) -> None:
    of_text = Lengths(
        model=Same(), feature_columns=["word"], label_columns=["y"], output_shapes=[[1]]
    )
    of_text.as_udf("odd `name. of it")
    words = "select `odd ``name. of it`(format_string('%0*d', id + 1, 0)) from rows"
    quoted = words.replace("format_string('%0*d', id + 1, 0)", "repeat('x', int(id))")
    assert sorted(row[0] for row in spark.sql(quoted).collect()) == list(range(7))
    transformed = TorchModel(
        model=Same(),
        feature_columns=["x"],
        label_columns=["y"],
        output_shapes=[[]],
        transformation_fn=lambda row: {"x": np.float32(row["x"])},
        apply_transformation=True,
        _metadata={"x": {"dtype": "object"}, "other": {"dtype": "int64"}},
    )
    found = rows.select(transformed.as_udf()(F.col("id").cast("string"))).collect()
    assert sorted(row[0] for row in found) == list(range(7))
