"""Spark ML's meta-estimators: OneVsRest, TrainValidationSplit, and pipelines within them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import pytorch_lightning
import torch
from backends import InProcessBackend
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import OneVsRest, OneVsRestModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel
from variants import others_in_soak

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.spark


def make_estimator(store: Any, width: int = 1, **params: Any) -> TorchEstimator:
    torch.manual_seed(0)
    net = torch.nn.Linear(width, 1)
    return TorchEstimator(
        **{
            "backend": InProcessBackend(),
            "store": store,
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loss": torch.nn.functional.mse_loss,
            "input_shapes": [[-1, width]],
            "label_shapes": [[-1, 1]],
            "random_seed": 1,
            "verbose": 0,
            **params,
        }
    )


@pytest.mark.slow
@pytest.mark.once
def test_one_vs_rest_trains_a_model_for_each_class(spark: Any, store: Any, tmp_path: Path) -> None:
    angles = 2 * np.pi * np.arange(3) / 3
    kinds = ["zebra", "ant", "moose"]
    points = [(float(np.cos(a)), float(np.sin(a)), k) for a, k in zip(angles, kinds, strict=True)]
    # The most frequent class, which is not the first in the alphabet, gets number 0.
    frame = spark.createDataFrame([*points * 4, *points[1:2], points[1]], ["a", "b", "kind"])
    stages = [
        StringIndexer(inputCol="kind", outputCol="number"),
        VectorAssembler(inputCols=["a", "b"], outputCol="in put"),
    ]
    frame = Pipeline(stages=stages).fit(frame.coalesce(1)).transform(frame.coalesce(1))
    classifier = make_estimator(
        store,
        width=2,
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        outputs_are="logits",
        learning_rate=1.0,
        epochs=8,
        batch_size=14,
    )
    several = OneVsRest(featuresCol="in put", labelCol="number", classifier=classifier)
    with pytest.raises(ParamError, match=r"rawPredictionCol: OneVsRest .* Set rawPredictionCol"):
        several.fit(frame)
    # OneVsRest's columns for each class override the classifier's.
    classifier.setRawPredictionCol("rawPrediction").setLabelCols(["kind"])
    model = several.fit(frame)
    assert classifier.getLabelCols() == ["kind"]

    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = OneVsRestModel.load(str(tmp_path / "model"))
    rows = loaded.transform(frame.limit(4)).collect()
    assert [row["prediction"] for row in rows] == [row["number"] for row in rows]
    assert [row["number"] for row in rows[:2]] != [0, 1]
    inputs = np.array([row["in put"].toArray() for row in rows])
    nets = [one.getModel() for one in model.models]
    weights = np.stack([net.weight.detach().numpy()[0] for net in nets])
    scores = inputs @ weights.T + [net.bias.item() for net in nets]
    raw = np.array([row["rawPrediction"].toArray() for row in rows])
    np.testing.assert_allclose(raw, scores, atol=1e-5)


def linear(bias: bool) -> torch.nn.Linear:
    return torch.nn.Linear(1, 1, bias=bias)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.soak
def test_train_validation_split_over_pipelines_and_columns(
    spark: Any, store: Any, tmp_path: Path
) -> None:
    frame = spark.range(40).selectExpr("id / 40 AS `Größe m`", "-id / 40 AS b", "id / 20 AS y")
    frame.write.parquet(str(tmp_path / "rows"))
    frame = spark.read.parquet(str(tmp_path / "rows"))
    estimator = make_estimator(
        store, feature_cols=["b"], label_cols=["y"], model=linear, optimizer=sgd
    )
    columns = [["v"], ["Größe m"]]
    assembler = VectorAssembler(inputCols=["b"], outputCol="v")
    pipeline = Pipeline(stages=[Pipeline(stages=[assembler]), Pipeline(stages=[estimator])])
    grid = (
        ParamGridBuilder()
        .addGrid(estimator.feature_cols, columns)
        .addGrid(estimator.model_args, [{"bias": True}, {"bias": False}])
        .build()
    )
    evaluator = RegressionEvaluator(predictionCol="y__output", labelCol="y")
    split = TrainValidationSplit(
        estimator=pipeline,
        estimatorParamMaps=grid,
        evaluator=evaluator,
        seed=3,
        parallelism=2,
        collectSubModels=True,
    )
    found = split.fit(frame)
    trained = [model.stages[1].stages[0] for model in found.subModels]
    assert [one.getFeatureColumns() for one in trained] == [["v"], ["v"], *[["Größe m"]] * 2]
    assert all(len(one.getHistory()) == 1 for one in trained)
    assert np.isfinite(found.validationMetrics).all()
    best = grid[int(np.argmin(found.validationMetrics))]
    last = found.bestModel.stages[1].stages[0]
    assert last.getFeatureColumns() == best[estimator.feature_cols]

    split.save(str(tmp_path / "split"))
    loaded_grid = TrainValidationSplit.load(str(tmp_path / "split")).getEstimatorParamMaps()
    assert [list(point.values()) for point in loaded_grid] == [list(p.values()) for p in grid]
    found.write().option("persistSubModels", "true").save(str(tmp_path / "found"))
    found.bestModel.save(str(tmp_path / "best"))
    loaded = TrainValidationSplitModel.load(str(tmp_path / "found"))
    assert loaded.validationMetrics == pytest.approx(found.validationMetrics)
    expected = found.transform(frame).select("y__output").collect()
    best_loaded = PipelineModel.load(str(tmp_path / "best"))
    for made in (loaded, best_loaded):
        assert made.transform(frame).select("y__output").collect() == expected
    kept = [model.stages[1].stages[0] for model in loaded.subModels]
    for one, before in zip(kept, trained, strict=True):
        assert one.getHistory() == before.getHistory()
        assert torch.equal(one.getModel().weight, before.getModel().weight)
    # Spark's other ways to fit.
    fitted = dict(pipeline.fitMultiple(frame, grid[::3]))
    names = [fitted[place].stages[1].stages[0].getFeatureColumns() for place in (0, 1)]
    assert names == columns
    (again,) = pipeline.fit(frame, grid[3:])
    assert again.transform(frame).select("y__output").collect() == (
        fitted[1].transform(frame).select("y__output").collect()
    )


def nets() -> dict[str, tuple[Any, Any, Any]]:
    """Return an estimator's class, its model and an optimizer, by framework."""
    net = torch.nn.Linear(1, 1)
    dense = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    return {
        "torch": (TorchEstimator, net, torch.optim.SGD(net.parameters(), lr=0.5)),
        "keras": (KerasEstimator, dense, keras.optimizers.SGD(0.5)),
        "lightning": (LightningEstimator, pytorch_lightning.LightningModule(), None),
    }


@pytest.mark.parametrize("kind", others_in_soak("torch", "keras", "lightning"))
def test_params_round_trip_and_other_classes_are_rejected(
    spark: Any, store: Any, tmp_path: Path, kind: str
) -> None:
    cls, net, optimizer = nets()[kind]
    values = {
        "feature_cols": ["Größe m", "b.c"],
        "label_cols": ["y"],
        "epochs": 3,
        "learning_rate": 0.25,
        "shuffle": False,
        "validation": "held out",
        "predictionCol": "vorher gesagt",
        "partitions_per_process": 2,
        "handleInvalid": "skip",
    }
    if kind != "keras":
        values |= {"column_dtypes": {"y": "int64"}, "input_shapes": [[-1, 1], [-1, 3]]}
    estimator = cls(model=net, store=store, **values)
    if optimizer is not None:
        estimator.setOptimizer(optimizer)
    path, outer = str(tmp_path / "estimator"), str(tmp_path / "pipeline")
    estimator.save(path)
    with pytest.raises(StoreError, match="exists"):
        estimator.save(path)
    estimator.setEpochs(4).write().overwrite().save(path)
    Pipeline(stages=[Pipeline(stages=[estimator])]).save(outer)
    for loaded in (cls.load(path), Pipeline.load(outer).getStages()[0].getStages()[0]):
        assert type(loaded) is cls
        assert loaded.uid == estimator.uid
        found = {param.name for param in loaded.params if loaded.isSet(param)}
        assert found == {param.name for param in estimator.params if estimator.isSet(param)}
        for name, value in {**values, "epochs": 4}.items():
            assert loaded.getOrDefault(name) == value
        assert [p.parent for p in loaded.extractParamMap()] == [estimator.uid] * len(loaded.params)
        assert loaded.copy({loaded.epochs: 9}).getEpochs() == 9
    others = [other for other, _, _ in nets().values() if other is not cls]
    for other in others:
        # Like Spark's own classes, load() returns an object of the saved class.
        if issubclass(cls, other):
            assert type(other.load(path)) is cls
            continue
        with pytest.raises(
            ParamError, match=rf"holds a .*not a {other.__name__}.*{cls.__name__}\.load"
        ):
            other.load(path)
    with pytest.raises(ParamError, match=r"holds a .*Pipeline, not a"):
        cls.load(outer)
    sub = type("Sub", (cls,), {"__module__": "a_users_program"})
    sub(model=net).save(str(tmp_path / "sub"))
    assert type(cls.load(str(tmp_path / "sub"))) is cls
