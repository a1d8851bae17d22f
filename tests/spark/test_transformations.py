"""Fits with a transformation that turns strings into numbers between reading and batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import line_estimator
from pyspark.sql import functions as F

from hvd_estimators import clear_training_cache
from hvd_estimators.exceptions import DataError, ParamError, ShapeError
from hvd_estimators.torch import load_predictor

pytestmark = pytest.mark.spark

WORDS = ["", "a", "bb", "ccc", "dddd"]


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": len(row["word"]), "y": row["y"], "word": row["word"]}


def tokenize_batch(columns: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.char.str_len(columns["word"].astype(str)), "y": columns["y"]}


def make_frame(spark: Any) -> Any:
    """Return words, and three times their lengths."""
    rows = [(WORDS[i % 5], 3.0 * (i % 5)) for i in range(100)]
    return spark.createDataFrame(rows, "word string, y double").withColumn("x", F.lit(0.0))


def estimator_of_lengths(store: Any, **params: Any) -> Any:
    net = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(net.weight)
    defaults = {
        "feature_cols": ["x"],
        "continuous_cols": ["word"],
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05),
        "epochs": 12,
        "batch_size": 10,
    }
    return line_estimator(store, **{**defaults, **params})


@pytest.mark.parametrize(
    "reading",
    [{}, {"data_module": "arrow"}, {"reader_pool_type": "process"}],
    ids=["the default", "arrow", "processes"],
)
@pytest.mark.parametrize(
    "form",
    [
        {"transformation_fn": tokenize, "transformation_removed_fields": ["word"]},
        {
            "transformation_batch_fn": tokenize_batch,
            "transformation_edit_fields": [("x", np.float32, ())],
        },
    ],
)
def test_a_transformation_turns_strings_into_numbers(
    spark: Any, store: Any, form: dict[str, Any], reading: dict[str, Any]
) -> None:
    model = estimator_of_lengths(store, **reading, **form).fit(make_frame(spark))

    assert float(model.getModel().weight) == pytest.approx(3, abs=0.05)
    assert float(model.getModel().bias) == pytest.approx(0, abs=0.15)


def test_transformations_apply_to_parquet_of_other_programs(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    make_frame(spark).write.parquet(store.get_train_data_path())
    estimator = estimator_of_lengths(store, transformation_fn=tokenize)

    model = estimator.fit_on_parquet()

    assert float(model.getModel().weight) == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"transformation_fn": lambda row: row, "feature_cols": ["word"]}, DataError, "'word' is"),
        ({"transformation_fn": lambda row: {"x": row["x"]}}, DataError, "no field 'y'"),
        (
            {"transformation_fn": lambda row: {"x": [row["x"]] * 2, "y": row["y"]}},
            ShapeError,
            "model",
        ),
        ({"transformation_edit_fields": [("x", "int64", ())]}, ParamError, "Set transformation_fn"),
    ],
)
def test_wrong_transformations_are_rejected_before_ranks_start(
    spark: Any, store: Any, params: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        estimator_of_lengths(store, input_shapes=None, **params).fit(make_frame(spark))
    clear_training_cache()
    assert not store.exists(f"{store.prefix_path}/runs")


def lengths(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "x": np.char.str_len(columns["word"].astype(str))}


def test_rows_without_a_label_are_predicted_in_all_ways(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    model = estimator_of_lengths(
        store,
        transformation_batch_fn=lengths,
        transformation_edit_fields=[("x", np.float32, ())],
        transformation_removed_fields=["word"],
        apply_transformation=True,
        epochs=1,
    ).fit(make_frame(spark))
    rows = [("a", 1.0, 0.0), ("ccc", None, 0.0)]
    frame = spark.createDataFrame(rows, "word string, y double, x double")
    found = [row["y__output"] for row in model.transform(frame).collect()]
    assert None not in found
    assert found[0] != found[1]
    # A column that only the transformation needs has nulls of rows, too.
    with_null = frame.union(spark.createDataFrame([(None, 1.0, 0.0)], frame.schema))
    for on_nulls, more in (("keep", [None]), ("skip", [])):
        model.setHandleInvalid(on_nulls)
        rows = [row["y__output"] for row in model.transform(with_null).collect()]
        assert rows == [*found, *more]
    for on_nulls in ("skip", "error"):
        model.setHandleInvalid(on_nulls)
        assert [row["y__output"] for row in model.transform(frame).collect()] == found
        model.write().overwrite().save(str(tmp_path / "model"))
        predict = load_predictor(str(tmp_path / "model")).predict
        alone = predict([{"word": "a", "y": 1.0, "x": 0.0}, {"word": "ccc", "x": 0.0}])
        assert [row["y__output"] for row in alone] == pytest.approx(found)
