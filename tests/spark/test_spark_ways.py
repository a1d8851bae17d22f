"""Spark's and MLflow's tools: evaluators, validators, transformations and saved models."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from backends import InProcessBackend
from packaging.requirements import Requirement
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import functions as F
from variants import others_in_soak

from hvd_estimators.exceptions import ColumnError
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


PREDICT_WITHOUT_SPARK = """
import json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j", "horovod", "petastorm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
predicted = model.predict(pandas.DataFrame(json.loads(sys.argv[2])))
import hvd_estimators
print(json.dumps([predicted.to_dict("list"), hvd_estimators.__file__]))
"""


def test_a_fit_logs_a_model_to_mlflow_that_predicts_without_spark(
    spark: Any, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DFS_TMP", str(tmp_path / "files"))
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    # A module beside the user's script, which no index has.
    (tmp_path / "nets_beside_script.py").write_text(
        "import torch\n\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x, matrix):\n"
        "        return super().forward(x) + matrix[:, 1:]\n"
    )
    spark.sparkContext.addPyFile(str(tmp_path / "nets_beside_script.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("nets_beside_script").Net(2, 1)
    frame = spark.range(20).select(
        F.array(F.col("id") / 20.0, F.lit(0.5)).alias("x"),
        (F.col("id") / 7.0).alias("a b"),
        (F.col("id") % 3).cast("int").alias("n"),
        (F.col("id") / 10.0).alias("größe y"),
    )
    estimator = TorchEstimator(
        backend=InProcessBackend(),
        store=store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x", ["a b", "n"]],
        label_cols=["größe y"],
        input_shapes=[[-1, 2], [-1, 2]],
        label_shapes=[[-1, 1]],
        batch_size=5,
        epochs=2,
        validation=0.2,
        verbose=0,
    )
    try:
        with mlflow.start_run() as run:
            model = estimator.fit(frame)
            logged = mlflow.last_logged_model()
            # The user's own model in the same run.
            mlflow.spark.log_model(
                PipelineModel([model]), artifact_path="model", pip_requirements=[]
            )
            assert mlflow.active_run().info.run_id == run.info.run_id
        found = mlflow.MlflowClient().get_run(run.info.run_id)
        assert found.info.status == "FINISHED"
        assert found.data.params.keys() == {
            *(param.name for param in estimator.params if estimator.isSet(param)),
            "run_id",
        }
        _, epoch = model.getHistory()
        shown = {m.key: (m.step, m.value) for m in logged.metrics}
        for name, stage in (("loss", "train"), ("val_loss", "validation")):
            loss = epoch[stage]["loss"]
            assert found.data.metrics[name] == loss
            assert shown[name] == (1, loss)
        expected = [row["größe y__output"] for row in model.transform(frame).collect()]
        loaded = mlflow.spark.load_model(f"runs:/{run.info.run_id}/hvd_estimators_model")
        predicted = loaded.transform(frame).select("größe y__output").collect()
        assert [value for (value,) in predicted] == expected
        found_own = mlflow.spark.load_model(f"runs:/{run.info.run_id}/model")
        assert found_own.stages[0].uid == model.uid

        path = mlflow.artifacts.download_artifacts(logged.model_uri, dst_path=str(tmp_path / "got"))
        described = mlflow.models.Model.load(path)
        types = {c.name: str(c.type) for c in described.signature.inputs.inputs}
        assert types == {"x": "Array(double)", "a b": "DataType.double", "n": "DataType.long"}
        assert described.signature.outputs.input_types() == [mlflow.types.DataType.double] * 2
        example = described.load_input_example(path)
        given = {(*row["x"], row["a b"], row["n"]) for row in frame.collect()}
        rows = zip(example["x"], example["a b"], example["n"], strict=True)
        assert {(*x, a, n) for x, a, n in rows} <= given
        requirements = [
            Requirement(line) for line in Path(path, "requirements.txt").read_text().splitlines()
        ]
        for requirement in requirements:
            assert requirement.specifier.contains(version(requirement.name))
            assert "+" not in str(requirement)
        names = {requirement.name for requirement in requirements}
        assert {"mlflow-skinny", "numpy", "torch"} <= names
        assert names.isdisjoint({"horovod", "pyspark", "keras"})

        rows = [row.asDict() for row in frame.select("x", "a b", "n").collect()]
        arguments = [path, json.dumps(rows)]
        done = subprocess.run(
            [sys.executable, "-c", PREDICT_WITHOUT_SPARK, *arguments],
            cwd="/",
            env={n: v for n, v in os.environ.items() if n != "PYTHONPATH"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        predicted, package = json.loads(done.stdout)
        assert predicted == {"größe y__output": expected, "prediction": expected}
        # No index has the package of a checkout, so the model contains it.
        assert Path(package).is_relative_to(path)
        assert (Path(path, "code") / "nets_beside_script.py").exists()
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


@pytest.mark.parametrize("framework", others_in_soak("torch", "keras"))
def test_a_validator_with_a_grid_is_saved_and_loaded(
    spark: Any, store: Any, tmp_path: Path, framework: str
) -> None:
    estimator: Any
    best: Any
    if framework == "torch":
        net = torch.nn.Linear(1, 1)
        optimizer: Any = torch.optim.Adam([net.weight], lr=0.2)
        estimator = TorchEstimator(model=net, optimizer=optimizer, store=store)
        best = TorchModel(model=net, feature_columns=["x"], label_columns=["y"])
    else:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.2)
        estimator = KerasEstimator(model=model, optimizer=optimizer, store=store)
        best = KerasModel(model=model, feature_columns=["x"], label_columns=["y"])
    grid = (
        ParamGridBuilder()
        .addGrid(estimator.feature_cols, [["x"], ["x", "z"]])
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
        assert [first.getFeatureCols(), second.getFeatureCols()] == [["x"], ["x", "z"]]
        made = second.getOptimizer()
        assert type(made) is type(optimizer)
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
