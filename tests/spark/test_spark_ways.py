"""Spark's and MLflow's tools: evaluators, validators, transformations and saved models."""

from __future__ import annotations

import importlib
import json
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
from estimators import line_estimator
from packaging.requirements import Requirement
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import functions as F
from variants import others_in_soak

from hvd_estimators.keras import KerasEstimator, KerasModel, load_predictor
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.spark


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
    estimator = line_estimator(
        store,
        model=net,
        lr=0.1,
        backend=InProcessBackend(),
        feature_cols=["x", ["a b", "n"]],
        label_cols=["größe y"],
        input_shapes=[[-1, 2], [-1, 2]],
        label_shapes=[[-1, 1]],
        batch_size=5,
        epochs=2,
        validation=0.2,
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
