"""Spark's tests of params, applied to each estimator and model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pyspark.ml.param import Param

from hvd_estimators.keras import KerasEstimator, KerasModel
from hvd_estimators.lightning import LightningEstimator, LightningModel
from hvd_estimators.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.versions


@pytest.mark.parametrize(
    "cls",
    [
        *(TorchEstimator, KerasEstimator, LightningEstimator),
        *(TorchModel, KerasModel, LightningModel),
    ],
)
def test_params_behave_like_those_of_sparks_stages(cls: Any) -> None:
    stage, other = cls(), cls()
    assert stage.uid != other.uid
    assert stage.uid.startswith(cls.__name__)
    names = [param.name for param in stage.params]
    assert names == sorted(names)
    assert "predictionCol" in names
    explained = stage.explainParams()
    for name in names:
        param = stage.getParam(name)
        assert isinstance(param, Param)
        assert (param.parent, param.name) == (stage.uid, name)
        assert param.doc
        assert getattr(stage, name) == param != getattr(other, name)
        assert stage.hasParam(name)
        assert stage.hasDefault(param)
        assert stage.isDefined(name)
        assert not stage.isSet(param)
        assert f"{name}: {param.doc}" in explained
        assert stage.explainParam(name) in explained
    assert not stage.hasParam("epoch s")
    assert set(stage.extractParamMap()) == set(stage.params)

    stage.set(stage.predictionCol, "p7")
    assert stage.isSet("predictionCol")
    assert "current: p7" in stage.explainParam("predictionCol")
    assert stage.extractParamMap()[stage.predictionCol] == "p7"
    assert stage.extractParamMap({stage.predictionCol: "p8"})[stage.predictionCol] == "p8"
    assert stage.getOrDefault(stage.predictionCol) == stage.getPredictionCol() == "p7"

    copied = stage.copy({stage.predictionCol: "p9", other.predictionCol: "p10"})
    assert copied.uid == stage.uid
    assert copied.extractParamMap()[stage.predictionCol] == copied.getPredictionCol() == "p9"
    copied.setPredictionCol("p11")
    assert (stage.getPredictionCol(), stage.copy().getPredictionCol()) == ("p7", "p7")
    assert copy.copy(stage).getPredictionCol() == "p7"
    stage.clear(stage.predictionCol)
    assert not stage.isSet("predictionCol")
    assert stage.getPredictionCol() == other.getPredictionCol()
    assert copied.getPredictionCol() == "p11"
