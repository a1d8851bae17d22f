"""Embedding sizes from the column metadata of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.ml import Pipeline
from pyspark.ml.feature import Bucketizer, QuantileDiscretizer, StringIndexer, VectorAssembler

from hvd_estimators import cardinalities
from hvd_estimators.exceptions import ColumnError, ParamError

pytestmark = pytest.mark.spark

COLOURS = ["red", "blue", "green", "blue", "red", "blue"]


@pytest.fixture(scope="module")
def indexed(spark: Any) -> Any:
    rows = [(colour, colour, float(size)) for size, colour in enumerate(COLOURS)]
    frame = spark.createDataFrame(rows, ["colour", "é", "size"])
    stages = [
        StringIndexer(inputCol="colour", outputCol="index"),
        StringIndexer(inputCol="é", outputCol="c d", handleInvalid="keep"),
        Bucketizer(splits=[-1.0, 2.0, 4.0, 9.0, 99.0], inputCol="size", outputCol="bucket"),
        QuantileDiscretizer(numBuckets=2, inputCol="size", outputCol="half"),
        VectorAssembler(inputCols=["c d", "size"], outputCol="vector"),
    ]
    made = Pipeline(stages=stages).fit(frame).transform(frame)
    # Spark's own transformers do not accept dots in names.
    return made.withColumnRenamed("index", "colour.index")


def test_categories_are_counted_without_a_job(spark: Any, indexed: Any) -> None:
    spark.sparkContext.setJobGroup("cardinalities", "")
    found = cardinalities(indexed, ["c d", "colour.index", "bucket", "half"])
    jobs = spark.sparkContext.statusTracker().getJobIdsForGroup("cardinalities")
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    # One more for unseen values; buckets without rows count, too.
    assert list(found.items()) == [("c d", 4), ("colour.index", 3), ("bucket", 4), ("half", 2)]
    assert len(jobs) == 0


def test_metadata_survives_filters_and_renames(indexed: Any) -> None:
    renamed = indexed.filter("size > 2").withColumnRenamed("colour.index", "`kind`")
    assert cardinalities(renamed, "`kind`") == {"`kind`": 3}
    kept = indexed.withMetadata("size", {"ml_attr": {"type": "nominal", "num_vals": 7}})
    assert cardinalities(kept, ["size"]) == {"size": 7}
    binary = indexed.withMetadata("size", {"ml_attr": {"type": "binary"}})
    assert cardinalities(binary, ["size"]) == {"size": 2}


@pytest.mark.parametrize("kind", ["bucketizer", "quantiles", "indexer"])
def test_only_string_indexers_count_kept_invalid_values(spark: Any, kind: str) -> None:
    names = {"inputCol": "size", "outputCol": "out", "handleInvalid": "keep"}
    stages: dict[str, Any] = {
        "bucketizer": Bucketizer(splits=[0.0, 1.0, 2.0], **names),
        "quantiles": QuantileDiscretizer(numBuckets=2, **names),
        "indexer": StringIndexer(**names),
    }
    frame = spark.createDataFrame([(0.5,), (1.5,), (None,)], "size double")
    if kind != "indexer":
        frame = frame.fillna({"size": float("nan")})
    made = Pipeline(stages=[stages[kind]]).fit(frame).transform(frame)
    largest = max(row["out"] for row in made.collect())
    # If Spark ever records NaN's bucket, the docstring's "add one" is wrong.
    assert cardinalities(made, ["out"]) == {"out": 3 if kind == "indexer" else 2}
    assert largest == 2.0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["size"], "nothing notes how many values 'size' has. Write it with .*StringIndexer"),
        (["vector"], "'vector' is a vector, found 2 numbers"),
        (["shade"], "has no column 'shade'"),
        ([], "expected at least one column name"),
    ],
)
def test_columns_without_metadata_are_an_error(indexed: Any, columns: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        cardinalities(indexed, columns)


def test_objects_that_are_not_dataframes_are_rejected() -> None:
    with pytest.raises(ParamError, match="df"):
        cardinalities({"a": [1]}, ["a"])  # type: ignore[arg-type]
