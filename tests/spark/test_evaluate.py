"""``model.evaluate``: losses and metrics of training on any DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import line_estimator
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from torch.nn import functional
from torchmetrics.classification import MulticlassAUROC

from hvd_estimators.exceptions import ColumnError, DataError, ParamError, PredictionError
from hvd_estimators.launch import LocalBackend
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.spark

CLASSES = 3
CLASS_WEIGHT = torch.tensor([0.5, 1.0, 3.0])
ROWS = 90


def columns() -> dict[str, np.ndarray[Any, Any]]:
    """Return rows with a class, some of which are ignored, a number and a weight."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(ROWS, 2)).astype(np.float32)
    kind = np.argmax(x @ rng.normal(size=(2, CLASSES)), axis=1)
    return {
        "x": x,
        "kind": np.where(rng.uniform(size=ROWS) < 0.2, -100, kind),
        "y": rng.normal(size=ROWS).astype(np.float32),
        "w": rng.uniform(0.1, 4.0, size=ROWS).astype(np.float32),
        "held_out": np.arange(ROWS) % 3 == 0,
    }


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    made = columns()
    rows = [
        (Vectors.dense(x.tolist()), int(kind), float(y), float(w), bool(held_out))
        for x, kind, y, w, held_out in zip(*made.values(), strict=True)
    ]
    return spark.createDataFrame(rows, list(made)).repartition(2).cache()


class Net(torch.nn.Module):
    """Scores of classes, and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Linear(2, CLASSES + 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(x)
        return out[:, :CLASSES], out[:, CLASSES]


def settings(store: Any, net: Any, **params: Any) -> dict[str, Any]:
    return {
        "backend": LocalBackend(2),
        "store": store,
        "model": net,
        "feature_cols": ["x"],
        "batch_size": 8,
        "epochs": 2,
        "random_seed": 1,
        "validation": "held_out",
        "verbose": 0,
        **params,
    }


def assert_last_validation(evaluated: Any, model: Any) -> None:
    """Compare an evaluation of the held-out rows with the last validation of training."""
    last = model.summary.totalIterations - 1
    expected = {
        name: value
        for epoch, stage, name, value in model.summary.metrics
        if (epoch, stage) == (last, "validation")
    }
    assert dict(evaluated.metrics).keys() == expected.keys()
    for name, value in expected.items():
        assert evaluated[name] == pytest.approx(value, rel=1e-5), name
    assert evaluated.rows == model.summary.validation_rows


@pytest.mark.once
def test_torch_losses_and_metrics_equal_those_of_validation_and_of_one_process(
    spark: Any, store: Any, frame: Any, tmp_path: Path
) -> None:
    net = Net()
    estimator = TorchEstimator(
        **settings(
            store,
            net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
            label_cols=["kind", "y"],
            column_dtypes={"kind": "int64"},
            sample_weight_col="w",
            loss=[
                torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHT, ignore_index=-100),
                functional.smooth_l1_loss,
            ],
            loss_weights=[0.7, 2.0],
            metrics=[[MulticlassAUROC(num_classes=CLASSES, ignore_index=-100), functional.l1_loss]],
        )
    )
    model = estimator.fit(frame)
    held_out = frame.where("held_out")
    evaluated = model.evaluate(held_out)
    assert_last_validation(evaluated, model)

    model.write().overwrite().save(f"{tmp_path / 'model'}")
    loaded = TorchModel.load(f"{tmp_path / 'model'}")
    all_rows = loaded.setInferenceBatchSize(7).evaluate(frame.drop("held_out"))
    made = {name: torch.from_numpy(array) for name, array in columns().items()}
    with torch.no_grad():
        scores, number = model.getModel()(made["x"])
    elements = functional.cross_entropy(
        scores, made["kind"], CLASS_WEIGHT, ignore_index=-100, reduction="none"
    )
    counted = CLASS_WEIGHT[made["kind"].clamp(min=0)][made["kind"] >= 0].sum()
    distance = functional.smooth_l1_loss(number, made["y"], reduction="none")
    weight = made["w"]
    loss = 0.7 * (elements * weight).sum() / counted + 2.0 * (distance * weight).mean()
    auroc = MulticlassAUROC(num_classes=CLASSES, ignore_index=-100)(scores, made["kind"])
    assert all_rows.rows == ROWS
    assert all_rows.loss == pytest.approx(float(loss), rel=1e-5)
    assert all_rows["kind_MulticlassAUROC"] == pytest.approx(float(auroc), rel=1e-5)
    mean = functional.l1_loss(number, made["y"])
    assert all_rows["y_l1_loss"] == pytest.approx(float(mean), rel=1e-5)

    # Rows with nulls fail, as in training, or are left out.
    with_nulls = held_out.withColumn("y", F.when(F.col("w") > 1, F.col("y")))
    with pytest.raises(DataError, match=r"Column 'y' holds nulls.*handleInvalid='skip'"):
        model.evaluate(with_nulls)
    skipping = model.copy().setHandleInvalid("skip")
    some = skipping.evaluate(with_nulls)
    assert dict(some.metrics) == pytest.approx(
        dict(model.evaluate(held_out.where("w > 1")).metrics)
    )
    with pytest.raises(DataError, match="at least one row"):
        skipping.evaluate(with_nulls.withColumn("y", F.lit(None).cast("double")))

    # Errors that the driver finds before a job.
    with pytest.raises(ColumnError, match=r"label_columns: .*no column 'y'"):
        model.evaluate(held_out.drop("y"))
    with pytest.raises(ColumnError, match=r"sample_weight_col: .*no column 'w'"):
        model.evaluate(held_out.drop("w"))
    with pytest.raises(ColumnError, match=r"sample_weight_col: expected a column of numbers"):
        model.evaluate(held_out.withColumn("w", F.array("w")))
    with pytest.raises(ParamError, match="foreachBatch"):
        model.evaluate(spark.readStream.format("rate").load())
    with pytest.raises(PredictionError, match="Target 7 is out of bounds"):
        model.evaluate(held_out.withColumn("kind", F.lit(7)))
    # Other metrics than in training.
    others = model.copy().setMetrics([[functional.cross_entropy, functional.mse_loss]])
    squared = others.evaluate(held_out)["y_mse_loss"]
    rows = made["held_out"]
    assert squared == pytest.approx(float(functional.mse_loss(number[rows], made["y"][rows])), 1e-5)


def test_numbers_that_the_model_would_get_with_other_digits_are_an_error(
    spark: Any, store: Any
) -> None:
    rows = [(i, float(i)) for i in range(20)]
    model = line_estimator(store).fit(spark.createDataFrame(rows, "x bigint, y double"))
    known = spark.createDataFrame([(2**24, 0.0)], "x bigint, y double")
    assert model.evaluate(known)["loss"] > 0
    new = spark.createDataFrame([(2**24 + 1, 0.0)], "x bigint, y double")
    with pytest.raises(DataError, match="'x' holds 16777217, and the model takes float32"):
        model.evaluate(new)
