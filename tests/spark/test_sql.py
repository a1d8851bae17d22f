"""Predictions in SQL: views, cached tables, joins and chained columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from estimators import Noting
from pyspark.sql import functions as F

from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark

ROWS = 40


@pytest.fixture
def notes(spark: Any, tmp_path: Path) -> Iterator[Path]:
    """Create the view ``predictions`` of IDs and ID / 2 - 10; return the model's log of rows."""
    path = tmp_path / "rows"
    frame = spark.range(ROWS).select("id", (F.col("id") / 2 - 10).alias("x"))
    model = TorchModel(
        model=Noting(path), feature_columns=["x"], label_columns=["y"], output_shapes=[[]]
    )
    model.transform(frame).createOrReplaceTempView("predictions")
    # As values: from an expression of IDs, Spark would infer which IDs need no prediction.
    others = spark.createDataFrame([(number, number % 2) for number in range(ROWS)], ["id", "odd"])
    others.createOrReplaceTempView("others")
    yield path
    spark.catalog.dropTempView("predictions")
    spark.catalog.dropTempView("others")


def rows_seen(path: Path) -> int:
    seen = sum(map(int, path.read_text().split()))
    path.unlink()
    return seen


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("select id, p + 1 from (select id, y__output as p from predictions) where p > 0", 19),
        ("with p as (select y__output + x as z from predictions) select z from p where z > 2", 17),
        ("select * from predictions join others using (id) where odd = 1 and y__output > 0", 10),
        ("select * from others left join predictions using (id) where y__output > 5", 9),
        (
            "select floor(y__output) f, avg(y__output) m from predictions group by 1 having m > 0",
            10,
        ),
        ("select id, rank() over (order by id) r from predictions where y__output >= 0", 20),
        ("select * from predictions where y__output > 0 union all values (1, 2.0D, 3.0D)", 20),
        ("select distinct y__output from predictions where abs(y__output) < 5", 19),
    ],
)
def test_the_model_runs_once_per_row_of_a_query(
    spark: Any, notes: Path, query: str, rows: int
) -> None:
    assert len(spark.sql(query).collect()) == rows
    assert rows_seen(notes) == ROWS


def test_the_model_runs_once_with_caches_and_chained_columns(spark: Any, notes: Path) -> None:
    twice = F.udf(lambda value: 2 * value, "double")
    chained = spark.table("predictions").withColumn("z", F.col("y__output") * 3)
    chained = chained.withColumn("w", twice("z")).where("w > 0 and y__output < 8").where("z > 3")
    assert chained.select("id", "z").count() == 13
    assert rows_seen(notes) == ROWS

    spark.sql("cache table predictions")
    try:
        for query, rows in (("y__output > 0", 19), ("y__output < 0", 20), ("id = 3", 1)):
            assert spark.sql(f"select * from predictions where {query}").count() == rows
    finally:
        spark.sql("uncache table predictions")
    assert rows_seen(notes) == ROWS
