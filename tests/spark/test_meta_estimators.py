"""Spark ML's meta-estimators: OneVsRest, and params of pipelines and validators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import pytorch_lightning
import torch
from backends import InProcessBackend
from estimators import line_estimator
from pyspark.ml import Pipeline
from pyspark.ml.classification import OneVsRest, OneVsRestModel
from pyspark.ml.feature import StringIndexer, VectorAssembler
from variants import others_in_soak

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.spark


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
    classifier = line_estimator(
        store,
        width=2,
        backend=InProcessBackend(),
        label_shapes=[[-1, 1]],
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
