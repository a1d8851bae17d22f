"""Spark ML's default columns: features and label in, prediction out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from backends import InProcessBackend
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol

from hvd_estimators import keras as hvd_keras
from hvd_estimators import torch as hvd_torch
from hvd_estimators.compat.keras import KerasEstimator as CompatKerasEstimator
from hvd_estimators.compat.torch import TorchEstimator as CompatTorchEstimator
from hvd_estimators.exceptions import ColumnError
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.spark

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
NAMES = np.array(["low", "middle", "high"])[X.argmax(1)]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [(*map(float, row), str(name)) for row, name in zip(X, NAMES, strict=True)]
    return spark.createDataFrame(rows, "a double, b double, c double, name string").coalesce(1)


@pytest.fixture(scope="module")
def assembled(frame: Any) -> Any:
    made = VectorAssembler(inputCols=["a", "b", "c"], outputCol="features").transform(frame)
    return made.selectExpr("features", "a + 2 * b as label").cache()


def of_torch(store: Any, outputs: int, loss: Any, cls: Any = TorchEstimator, **params: Any) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, outputs)
    return cls(
        **{
            **{"backend": InProcessBackend(), "store": store, "model": net, "loss": loss},
            "optimizer": torch.optim.Adam(net.parameters(), lr=0.05),
            **{"epochs": 3, "random_seed": 1, "verbose": 0},
            **params,
        }
    )


def of_keras(
    store: Any, activation: str, loss: Any, cls: Any = KerasEstimator, outputs: int = 1
) -> Any:
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, activation)])
    return cls(
        **{"backend": InProcessBackend(), "store": store, "model": net, "loss": loss},
        **{"optimizer": keras.optimizers.Adam(0.05), "random_seed": 1, "verbose": 0},
    )


def test_a_classifier_in_a_pipeline_needs_no_columns(
    frame: Any, store: Any, tmp_path: Path, caplog: Any
) -> None:
    estimator = of_torch(store, 3, torch.nn.CrossEntropyLoss(), epochs=10)
    assert isinstance(estimator, (HasFeaturesCol, HasLabelCol, HasPredictionCol))
    assert (estimator.getFeaturesCol(), estimator.getLabelCol()) == ("features", "label")
    pipeline = Pipeline(
        stages=[
            StringIndexer(inputCol="name", outputCol="label"),
            VectorAssembler(inputCols=["a", "b", "c"], outputCol="features"),
            estimator,
        ]
    )
    fitted = pipeline.fit(frame)
    fitted.save(str(tmp_path / "model"))
    model = PipelineModel.load(str(tmp_path / "model"))
    predicted = model.transform(frame).cache()

    assert predicted.columns[-2:] == ["label__output", "prediction"]
    rows = predicted.collect()
    last = fitted.stages[-1]
    with torch.no_grad():
        logits = last.getModel()(torch.from_numpy(X)).numpy()
    assert [row["prediction"] for row in rows] == logits.argmax(1).tolist()
    # StringIndexer's labels are doubles, which the loss does not accept.
    right = np.mean([row["prediction"] == row["label"] for row in rows])
    assert right > 0.6
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
    assert accuracy.evaluate(predicted) == pytest.approx(right)
    assert (last.getOutputsAre(), last.getPredictionCol()) == ("logits", "prediction")

    loaded = model.stages[-1]
    again = predicted.drop("label__output")
    assert loaded.transform(again).columns == [*again.columns, "label__output"]
    assert "has a column 'prediction' already" in caplog.text
    with pytest.raises(ColumnError, match="'prediction' cannot be added"):
        loaded.copy({"predictionCol": "prediction"}).transform(again)
    bare = predicted.select("features")
    assert loaded.copy({"predictionCol": ""}).transform(bare).columns[1:] == ["label__output"]
    in_sql = bare.select(loaded.as_udf()("features").alias("of_udf"))
    assert dict(in_sql.dtypes)["of_udf"] == "array<double>"
    predicted.unpersist()


def test_a_regression_predicts_its_output(assembled: Any, store: Any) -> None:
    for loss in (torch.nn.functional.mse_loss, torch.nn.HuberLoss()):
        predicted = of_torch(store, 1, loss).fit(assembled).transform(assembled)
        rows = predicted.collect()
        assert predicted.columns == ["features", "label", "label__output", "prediction"]
        assert all(row["prediction"] == row["label__output"] for row in rows)
    errors = [row["label__output"] - row["label"] for row in rows]
    expected = np.sqrt(np.mean(np.square(errors)))
    assert RegressionEvaluator().evaluate(predicted) == pytest.approx(expected)
    # Nothing shows what this loss compares.
    unknown = of_torch(store, 1, lambda output, label: (output - label).abs().mean())
    assert unknown.fit(assembled).transform(assembled).columns[2:] == ["label__output"]


def test_a_binary_classifier_of_keras_predicts_classes(assembled: Any, store: Any) -> None:
    binary = assembled.selectExpr("features", "double(label > 0) as label")
    model = of_keras(store, "sigmoid", "binary_crossentropy").fit(binary)
    rows = model.transform(binary).collect()
    assert [r["prediction"] for r in rows] == [float(r["label__output"] > 0.5) for r in rows]
    assert {row["prediction"] for row in rows} == {0.0, 1.0}


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_independent_labels_are_predicted_one_by_one(
    spark: Any, store: Any, tmp_path: Path, framework: str
) -> None:
    labels = (X > [0.0, 0.5, -0.5]).astype(float)
    rows = [(Vectors.dense(x), Vectors.dense(y)) for x, y in zip(X, labels, strict=True)]
    tagged = spark.createDataFrame(rows, ["features", "label"]).coalesce(1)
    if framework == "torch":
        model = of_torch(store, 3, torch.nn.BCEWithLogitsLoss(), epochs=20).fit(tagged)
        with torch.no_grad():
            probability = torch.sigmoid(model.getModel()(torch.from_numpy(X))).numpy()
    else:
        model = of_keras(store, "sigmoid", "binary_crossentropy", outputs=3).fit(tagged)
        probability = model.getModel().predict(X, verbose=0)
    # As the message of a model without outputs_are suggests.
    kind = "logits" if framework == "torch" else "probabilities"
    model.setParams(outputs_are=kind, probabilityCol="probability", rawPredictionCol="raw")

    found = model.transform(tagged).toPandas()
    model.save(str(tmp_path / "model"))
    package = hvd_torch if framework == "torch" else hvd_keras
    alone = package.load_predictor(str(tmp_path / "model")).predict({"features": X})

    for name, expected in {"probability": probability, "prediction": probability > 0.5}.items():
        np.testing.assert_allclose(np.stack(found[name].map(lambda v: v.toArray())), expected, 1e-5)
        np.testing.assert_allclose(alone[name], expected, 1e-5)
    raw = np.stack(found["raw"].map(lambda v: v.toArray()))
    np.testing.assert_allclose(
        1 / (1 + np.exp(-raw)) if kind == "logits" else raw, probability, 1e-5
    )


def test_compat_adds_no_columns(assembled: Any, store: Any) -> None:
    given = of_torch(store, 1, torch.nn.functional.mse_loss, CompatTorchEstimator)
    assert given.fit(assembled).transform(assembled).columns[2:] == ["label__output"]
    given = of_keras(store, "linear", "mse", CompatKerasEstimator)
    assert given.fit(assembled).transform(assembled).columns[2:] == ["label__output"]
