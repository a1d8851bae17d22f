"""Columns that transform() adds: evaluated once, NaN kept, the user's columns preserved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.torch import TorchModel

pytestmark = pytest.mark.spark


class Noting(torch.nn.Module):
    """Return rows in a given shape, and log their number to a file."""

    def __init__(self, path: Path | None = None, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.path, self.shape = path, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{len(x)}\n")
        return x.reshape(len(x), *self.shape)


def make_model(module: torch.nn.Module, shape: tuple[int, ...] = (), **params: Any) -> TorchModel:
    return TorchModel(
        **{
            "model": module,
            "feature_columns": ["x"],
            "label_columns": ["y"],
            "output_shapes": [list(shape)],
            **params,
        }
    )


@pytest.mark.parametrize("classifies", [False, True])
def test_a_model_runs_once_per_row_under_any_filter(
    spark: Any, tmp_path: Path, classifies: bool
) -> None:
    path = tmp_path / "rows"
    params = {"predictionCol": "prediction", "outputs_are": "values"} if classifies else {}
    frame = spark.range(100).select("id", (F.col("id") - 50.0).alias("x"))
    predicted = make_model(Noting(path), **params).transform(frame)

    def run(chosen: Any) -> tuple[int, int]:
        path.unlink(missing_ok=True)
        found = len(chosen.collect())
        return found, sum(map(int, path.read_text().split()))

    assert run(predicted.where("y__output > 0")) == (49, 100)
    assert run(predicted.na.drop().where("y__output between 0 and 9")) == (10, 100)
    # A condition on another column is evaluated before the model runs.
    assert run(predicted.where("y__output < 0 and id < 10")) == (10, 10)
    assert run(predicted.select("x", (F.col("y__output") - F.col("x")).alias("z"))) == (100, 100)
    # The model does not run if no prediction is needed.
    path.unlink()
    assert predicted.count() == 100
    assert predicted.where("id < 10").select("x").count() == 10
    assert not path.exists()


class Choosy(torch.nn.Module):
    """Accept numbers up to 5, and fail on larger ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 5).any()):
            raise ZeroDivisionError("the seventh")
        return x


def test_a_models_error_reports_the_input_shapes(spark: Any) -> None:
    frame = spark.range(12).coalesce(1).select(F.col("id").cast("double").alias("x"))
    model = make_model(Choosy(), inference_batch_size=4)
    # The batch with the failing row, and the model's line; Spark omits the cause.
    told = (
        r"PredictionError: The model failed on some rows\. It was called with x \(4,\) float32\. "
        r"It raised ZeroDivisionError: the seventh \(.*test_predictions\.py, line \d+, in forward\)"
    )
    with pytest.raises(Exception, match=told):
        model.transform(frame).collect()
    assert len(model.transform(frame.where("x < 6")).collect()) == 6


def test_output_shapes_are_inferred_with_the_given_dtypes(spark: Any) -> None:
    frame = spark.createDataFrame([([3, 1, 2], [0.25, 0.5])], "words array<int>, x array<double>")
    net = torch.nn.Embedding(5, 2)

    def make(module: torch.nn.Module, name: str, *shapes: list[int], **dtypes: str) -> TorchModel:
        columns = {"feature_columns": [name], "label_columns": ["y"]}
        return TorchModel(model=module, input_shapes=[*shapes], column_dtypes=dtypes, **columns)

    found = make(net, "words", [-1, 3], words="int64").transform(frame).first()["y__output"]
    np.testing.assert_allclose(found, net(torch.tensor([3, 1, 2])).tolist())

    double = torch.nn.Linear(2, 2).double()
    found = make(double, "x", [-1, 2], x="float64").transform(frame).first()["y__output"]
    expected = double(torch.tensor([0.25, 0.5], dtype=torch.float64)).tolist()
    np.testing.assert_allclose(found.toArray(), expected, rtol=1e-14)
    with pytest.raises(ShapeError, match=r"x \(2, 2\) float32 and raised .* column_dtypes"):
        make(double, "x", [-1, 2]).transform(frame)
    with pytest.raises(ParamError, match="not known for inputs of any size"):
        make(net, "words", [-1, -1], words="int64").transform(frame)
    with pytest.raises(ParamError, match="input_shapes: expected a shape for each of words"):
        make(net, "words", [-1, 3], [-1], words="int64").transform(frame)
