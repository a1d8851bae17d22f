"""Values of grids, and params with two names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from pyspark.ml.tuning import ParamGridBuilder

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.checks import check_one_vs_rest
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator, TorchModel
from hvd_estimators.torch.framework import TorchFramework
from hvd_estimators.torch.serialization import module_file
from hvd_estimators.torch.trainer import load_objects

pytestmark = pytest.mark.versions


def test_grids_hold_plain_values_and_objects() -> None:
    net = torch.nn.Linear(1, 1)
    slow, fast = (torch.optim.SGD(net.parameters(), lr=rate) for rate in (0.1, 0.2))
    estimator = TorchEstimator(model=net)

    grid = (
        ParamGridBuilder()
        .addGrid(estimator.optimizer, [slow, fast])
        .addGrid(estimator.epochs, list(np.array([3])))
        .addGrid(estimator.model_args, [{"hidden": np.float32(2)}])
        .build()
    )

    assert [values[estimator.optimizer] for values in grid] == [slow, fast]
    assert json.dumps([values[estimator.epochs] for values in grid]) == "[3, 3]"
    assert json.dumps(grid[0][estimator.model_args]) == '{"hidden": 2.0}'
    copied = estimator.copy(grid[1])
    assert copied.getOptimizer() is fast
    assert copied.getEpochs() == 3
    estimator.set(estimator.optimizer, slow)
    assert estimator.getOptimizer() is slow


def test_wrong_grids_are_rejected_when_built() -> None:
    estimator = TorchEstimator()
    with pytest.raises(ParamError, match="epochs: expected 1 or more, found 0"):
        ParamGridBuilder().addGrid(estimator.epochs, [1, 0]).build()
    with pytest.raises(ParamError, match="feature_cols: expected names of columns, found 3"):
        ParamGridBuilder().addGrid(estimator.feature_cols, [["a", 3]]).build()
    built = ParamGridBuilder().addGrid(estimator.validation, [None, 0.1]).build()
    assert [point[estimator.validation] for point in built] == [None, 0.1]


def test_learning_rate_replaces_the_rates_of_a_copied_optimizer(tmp_path: Path) -> None:
    net = torch.nn.Linear(1, 1)
    groups = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias]}]
    given = torch.optim.SGD(groups, lr=0.2, momentum=0.9)

    estimator = TorchEstimator(
        model=net, optimizer=given, learning_rate=0.5, loss=torch.nn.MSELoss(), feature_cols=["x"]
    )

    file = module_file(TorchFramework(Fit(estimator).settings).trained_objects())
    objects, _ = load_objects(file, Store.create(str(tmp_path)), torch.device("cpu"))
    made = objects.optimizer
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.5]
    assert [group["momentum"] for group in made.param_groups] == [0.9, 0.9]
    assert [group["lr"] for group in given.param_groups] == [0.1, 0.2]


def compile_settings(**params: Any) -> Any:
    settings: Any = Fit(KerasEstimator(**params)).settings
    return settings.compile_settings()


def test_learning_rate_is_set_on_keras_optimizers_without_a_schedule() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    given = keras.optimizers.Adam(0.1)
    params: dict[str, Any] = {
        "model": model,
        "loss": "mse",
        "label_cols": ["y"],
        "feature_cols": ["x"],
    }

    settings = compile_settings(**params, optimizer=given, learning_rate=0.5)
    model.compile("sgd", "mse")
    settings.apply(model, None)

    assert type(model.optimizer) is keras.optimizers.Adam
    assert float(model.optimizer.learning_rate) == 0.5
    assert float(given.learning_rate) == pytest.approx(0.1)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    scheduled = keras.optimizers.Adam(schedule)
    with pytest.raises(ParamError, match="learning_rate: Adam does not let it be set"):
        compile_settings(**params, optimizer=scheduled, learning_rate=0.5)


@pytest.mark.parametrize("cls", [TorchEstimator, KerasEstimator, LightningEstimator])
def test_sparks_param_names_are_aliases(cls: Any) -> None:
    named = cls(featuresCol="f", labelCol="l", weightCol="w")

    assert (named.getFeatureCols(), named.getLabelCols()) == (["f"], ["l"])
    assert named.getSampleWeightCol() == "w"
    ours = cls(feature_cols=["f"], label_cols=["l", "m"], sample_weight_col="w")
    assert (ours.getFeaturesCol(), ours.getLabelCol(), ours.getWeightCol()) == ("f", None, "w")
    assert ours.copy({ours.featuresCol: "g"}).getFeaturesCol() == "g"
    assert (cls().getFeaturesCol(), cls().getFeatureCols()) == ("features", ["features"])
    assert (cls().getLabelCol(), cls().getLabelCols()) == ("label", ["label"])
    # Params of a fit take precedence, under either name.
    for extra, labels in (
        ({ours.labelCol: "z"}, ["z"]),
        ({ours.labelCol: "z", ours.epochs: 2}, ["z"]),
        ({ours.labelCol: None}, ["l", "m"]),
        ({}, ["l", "m"]),
    ):
        copied = ours.copy(extra)
        copied._check_other_names()
        assert copied.getLabelCols() == labels
    again = named.copy({named.label_cols: ["p", "q"]})
    again._check_other_names()
    assert (again.getLabelCols(), again.getFeatureCols()) == (["p", "q"], ["f"])
    assert (ours.getLabelCols(), named.getLabelCols()) == (["l", "m"], ["l"])
    with pytest.raises(ParamError, match="are two names of one parameter"):
        ours.copy({ours.labelCol: "z", ours.label_cols: ["l"]})._check_other_names()


def test_different_values_under_two_names_are_rejected() -> None:
    TorchEstimator(featuresCol="f", feature_cols=["f"])._check_other_names()
    with pytest.raises(ParamError, match=r"featuresCol='f' and feature_cols=\['g'\] are two names"):
        TorchEstimator(featuresCol="f", feature_cols=["g"])._check_other_names()


def test_one_vs_rest_without_raw_predictions_is_rejected_early(tmp_path: Path) -> None:
    store, net = Store.create(f"{tmp_path}"), torch.nn.Linear(1, 1)
    estimator = TorchEstimator(store=store, model=net, label_cols=["y"], outputs_are="logits")
    given = {estimator.labelCol: "mc2b$0", estimator.featuresCol: "x"}
    with pytest.raises(ParamError, match=r"^rawPredictionCol: OneVsRest .*Set rawPredictionCol"):
        check_one_vs_rest(Fit(estimator.copy(given)).settings)
    for fits in ({estimator.rawPredictionCol: "raw"}, {estimator.labelCol: "y"}):
        check_one_vs_rest(Fit(estimator.copy({**given, **fits})).settings)


def test_grids_of_class_level_params_fit_estimators_and_leave_models_alone() -> None:
    """Spark passes the estimator's dict to the fitted model."""
    (point,) = ParamGridBuilder().addGrid(TorchEstimator.epochs, [3]).build()
    assert TorchEstimator(model=torch.nn.Linear(1, 1)).copy(point).getEpochs() == 3
    model = TorchModel(model=torch.nn.Linear(1, 1), feature_columns=["x"])
    assert model.copy(point).getFeatureColumns() == ["x"]


def test_grids_of_models_leave_the_trained_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, before = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    (point,) = ParamGridBuilder().addGrid(TorchEstimator.model, [before]).build()
    assert TorchEstimator(model=trained).copy(point).getModel() is before
    model = TorchModel(model=trained, feature_columns=["x"])
    assert model.copy(point).getModel() is trained
    assert model.copy({model.model: before}).getModel() is before
    assert model.copy({"model": before}).getModel() is before
    monkeypatch.setattr(TorchModel, "_transform", lambda self, dataset: self)
    frame: Any = None
    for grid in (point, {"model": before}):  # as CrossValidator calls it
        found: Any = model.transform(frame, grid)
        assert found.getModel() is trained


def test_models_check_dtypes_as_estimators_do() -> None:
    model = TorchModel(model=torch.nn.Linear(1, 1), feature_columns=["x"])
    assert model.setColumnDtypes({"x": torch.float64}).getColumnDtypes() == {"x": "float64"}
    with pytest.raises(ParamError, match="column_dtypes: expected torch dtypes"):
        model.setColumnDtypes({"x": "number"})
