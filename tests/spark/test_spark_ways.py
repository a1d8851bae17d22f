"""Spark's and MLflow's tools: evaluators, validators, transformations and saved models."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import torch
from backends import InProcessBackend
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import functions as F

from hvd_estimators.exceptions import ColumnError
from hvd_estimators.fitting.mlflow import Tracking, active_run
from hvd_estimators.fitting.record import versions
from hvd_estimators.keras import KerasEstimator, KerasModel, load_predictor
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.spark


class Counting(torch.nn.Linear):
    """Log forward passes to a file."""

    path: Path | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{len(x)}\n")
        return super().forward(x)


def test_a_classifier_works_with_sparks_evaluators_in_one_pass(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    frame = spark.range(60).select(
        F.array((F.col("id") % 3 - 1.0), F.lit(0.5)).alias("x"), (F.col("id") % 3).alias("y")
    )
    net = Counting(2, 3)
    estimator = TorchEstimator(
        backend=InProcessBackend(),
        store=store,
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1.0),
        learning_rate=0.05,
        loss=torch.nn.functional.cross_entropy,
        featuresCol="x",
        labelCol="y",
        input_shapes=[[2]],
        label_shapes=[[]],
        column_dtypes={"y": "int64"},
        predictionCol="prediction",
        probabilityCol="probability",
        rawPredictionCol="rawPrediction",
        outputs_are="logits",
        epochs=20,
        batch_size=20,
        verbose=0,
    )
    model = estimator.fit(frame)
    assert model.getOptimizer().param_groups[0]["lr"] == 0.05
    assert model.getFeatureColumns() == ["x"]
    assert model._get_metadata()["x"]["shape"] == [2]
    model.getModel().path = tmp_path / "calls"
    model.save(str(tmp_path / "model"))
    predicted = TorchModel.load(str(tmp_path / "model")).transform(frame.coalesce(1))
    assert predicted.columns == [
        *("x", "y", "y__output", "prediction", "probability", "rawPrediction")
    ]
    rows = predicted.collect()
    assert model.getModel().path.read_text().split() == ["60"]

    logits = np.array([row["y__output"].toArray() for row in rows])
    powers = np.exp(logits)
    expected = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose([r["rawPrediction"].toArray() for r in rows], logits)
    np.testing.assert_allclose([r["probability"].toArray() for r in rows], expected, atol=1e-6)
    labels = np.array([row["y"] for row in rows])
    assert [r["prediction"] for r in rows] == expected.argmax(axis=1).tolist()
    evaluator = MulticlassClassificationEvaluator(labelCol="y", metricName="accuracy")
    accuracy = (expected.argmax(axis=1) == labels).mean()
    assert accuracy > 0.6
    assert evaluator.evaluate(predicted) == pytest.approx(accuracy)
    evaluator.setMetricName("logLoss")
    loss = -np.log(expected[np.arange(60), labels]).mean()
    assert evaluator.evaluate(predicted) == pytest.approx(loss, abs=1e-6)
    with pytest.raises(ColumnError, match="the column 'prediction' cannot be added"):
        model.transform(predicted.drop("y__output"))


def test_a_single_logit_works_with_the_binary_evaluator(spark: Any) -> None:
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    net.set_weights([np.array([[2.0]]), np.array([0.0])])
    model = KerasModel(
        model=net,
        feature_columns=["x"],
        label_columns=["y"],
        probabilityCol="probability",
        rawPredictionCol="rawPrediction",
        predictionCol="prediction",
        outputs_are="logits",
    )
    frame = spark.createDataFrame([(-1.0, 0.0), (0.5, 0.0), (1.0, 1.0), (0.2, 1.0)], ["x", "y"])
    predicted = model.transform(frame)
    rows = predicted.collect()
    assert [row["prediction"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    sigmoid = 1 / (1 + math.exp(2))
    np.testing.assert_allclose(rows[0]["probability"].toArray(), [1 - sigmoid, sigmoid], atol=1e-6)
    np.testing.assert_allclose(rows[0]["rawPrediction"].toArray(), [2, -2], atol=1e-6)
    # Three of the four pairs of a 1 and a 0 are in order.
    evaluator = BinaryClassificationEvaluator(labelCol="y")
    assert evaluator.evaluate(predicted) == pytest.approx(0.75)


def test_output_sizes_can_depend_on_the_batch(spark: Any, tmp_path: Path) -> None:
    words = keras.Input((None,), dtype="int32")
    doubled = keras.ops.stack([words, 2 * words], axis=-1)
    net = keras.Model(words, {"pairs": doubled, "words": words})
    model = KerasModel(
        model=net,
        feature_columns=["w"],
        label_columns=["words", "pairs"],
        # Like after a fit without a dry run.
        output_shapes=[[None], [None, 2]],
    )
    # More partitions than rows: some are empty.
    frame = spark.createDataFrame([([1, 2, 3],), ([4, 5, 6],)], ["w"]).repartition(3)
    first, second = sorted(model.transform(frame).collect(), key=lambda row: row["w"])
    assert first["words__output"].toArray().tolist() == [1.0, 2.0, 3.0]
    assert second["pairs__output"] == [[4.0, 8.0], [5.0, 10.0], [6.0, 12.0]]
    model.save(f"{tmp_path / 'model'}")
    predictor = load_predictor(f"{tmp_path / 'model'}")
    found = predictor.predict({"w": np.array([[7, 8]])})
    assert found["pairs__output"].tolist() == [[[7.0, 14.0], [8.0, 16.0]]]
    assert predictor.predict({"w": np.zeros((0, 2), int)})["pairs__output"].shape == (0, 1, 2)


def test_mlflow_saves_a_model_as_a_pyfunc(spark: Any, tmp_path: Path) -> None:
    mlflow_spark = pytest.importorskip("mlflow.spark")
    net = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(net.weight)
    model = TorchModel(
        model=net,
        feature_columns=["features"],
        label_columns=["y"],
        input_shapes=[[2]],
        predictionCol="prediction",
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    path = str(tmp_path / "model")
    mlflow_spark.save_model(
        PipelineModel([assembler, model]),
        path,
        dfs_tmpdir=str(tmp_path / "files"),
        pip_requirements=["torch"],
    )

    loaded = importlib.import_module("mlflow.pyfunc").load_model(path)

    frame = pd.DataFrame({"a": [1.0, 3.0, 0.0], "b": [2.0, 0.0, -1.0]})
    assert list(loaded.predict(frame)) == [1.0, 0.0, 0.0]


def test_a_model_logged_to_mlflow_predicts_the_same(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow.spark")
    mlflow = importlib.import_module("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DFS_TMP", str(tmp_path / "files"))
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    net = torch.nn.Linear(1, 1)
    model = TorchModel(
        model=net, feature_columns=["x"], label_columns=["größe `y`"], input_shapes=[[-1, 1]]
    )
    frame = spark.createDataFrame([(0.5,), (2.0,)], ["x"])
    expected = [row[-1] for row in model.transform(frame).collect()]
    try:
        with mlflow.start_run() as run:
            tracked = Tracking(active_run(), "mine", {}, own_run=False)
            tracked.complete([(0, "train", "loss", 0.5)], model, "torch", versions())
            # A second fit in the same run gets a child run.
            below = Tracking(active_run(), "other", {}, own_run=False)
            below.complete([], model, "torch", versions())
            assert mlflow.active_run().info.run_id == run.info.run_id
        client = mlflow.MlflowClient()
        runs = [found.info.run_id for found in client.search_runs([run.info.experiment_id])]
        assert len(runs) == 2
        for run_id in runs:
            assert client.get_run(run_id).info.status == "FINISHED"
            loaded = mlflow.spark.load_model(f"runs:/{run_id}/model")
            found = [row["größe `y`__output"] for row in loaded.transform(frame).collect()]
            assert found == expected
        by_pandas = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
        assert list(by_pandas.predict(pd.DataFrame({"x": [0.5, 2.0]}))) == expected
        files = {file.path for file in client.list_artifacts(run.info.run_id, "model")}
        requirements = Path(tmp_path, "mlruns").rglob("requirements.txt")
        assert "model/MLmodel" in files
        assert f"torch=={torch.__version__}" in next(requirements).read_text()
    finally:
        mlflow.set_tracking_uri(before)


def test_apply_transformation(spark: Any, tmp_path: Path) -> None:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(net.weight, 1.0)

    def by_row(row: dict[str, Any]) -> dict[str, Any]:
        factor = 10.0 if row["unit"] == "cm" else 1000.0
        return {"x": np.float32(row["x"] * factor), "dtype": row["x"].dtype.itemsize}

    model = TorchModel(
        model=net,
        feature_columns=["x"],
        label_columns=["y"],
        input_shapes=[[1]],
        transformation_fn=by_row,
        _metadata={"x": {"dtype": "float32"}, "unit": {"dtype": "object"}, "y": {"dtype": "int64"}},
    )
    frame = spark.createDataFrame([(1.5, "cm", "other"), (2.5, "m", "other")], ["x", "unit", "id"])
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))

    def predict(given: Any) -> list[float]:
        return [row["y__output"] for row in given.transform(frame).collect()]

    assert predict(loaded) == [1.5, 2.5]
    assert predict(loaded.setApplyTransformation(True)) == [15.0, 2500.0]
    without = frame.drop("unit")
    with pytest.raises(Exception, match="asks for a column 'unit', which the DataFrame does not"):
        loaded.transform(without).collect()


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_validator_with_a_grid_of_optimizers_is_saved_and_loaded(
    spark: Any, store: Any, tmp_path: Path, framework: str
) -> None:
    estimator: Any
    best: Any
    if framework == "torch":
        net = torch.nn.Linear(1, 1)
        estimator = TorchEstimator(model=net, store=store)
        optimizers: Any = [torch.optim.SGD(net.parameters(), lr=0.1)]
        optimizers.append(torch.optim.Adam([net.weight], lr=0.2))
        best = TorchModel(model=net, feature_columns=["x"], label_columns=["y"])
    else:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        estimator = KerasEstimator(model=model, store=store)
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.2)]
        best = KerasModel(model=model, feature_columns=["x"], label_columns=["y"])
    grid = (
        ParamGridBuilder()
        .addGrid(estimator.optimizer, optimizers)
        .addGrid(estimator.epochs, [3])
        .build()
    )
    evaluator = MulticlassClassificationEvaluator(labelCol="y")
    validator = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2
    )
    fitted = CrossValidatorModel(best, avgMetrics=[0.1, 0.2])
    for param in ("estimator", "estimatorParamMaps", "evaluator"):
        fitted._set(**{param: validator.getOrDefault(param)})
    validator.save(str(tmp_path / "validator"))
    fitted.save(str(tmp_path / "model"))

    for loaded in (
        CrossValidator.load(str(tmp_path / "validator")),
        CrossValidatorModel.load(str(tmp_path / "model")),
    ):
        inner = loaded.getEstimator()
        first, second = (inner.copy(values) for values in loaded.getEstimatorParamMaps())
        assert [first.getEpochs(), second.getEpochs()] == [3, 3]
        assert type(first.getOptimizer()) is type(optimizers[0])
        made = second.getOptimizer()
        assert type(made) is type(optimizers[1])
        if framework == "torch":
            assert made.param_groups[0]["lr"] == 0.2
            (weight,) = made.param_groups[0]["params"]
            assert weight is inner.getModel().weight
        else:
            assert float(made.learning_rate) == pytest.approx(0.2)
    assert loaded.avgMetrics == [0.1, 0.2]
    # A loaded model can be saved again.
    loaded.save(str(tmp_path / "again"))
    assert len(CrossValidatorModel.load(str(tmp_path / "again")).getEstimatorParamMaps()) == 2
