"""Frameworks' parts of a fit: one signature and one contract for all."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
import torch

from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, ResultsError
from hvd_estimators.fitting import settings as settings_module
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.training.spec import EpochMetrics, TrainResult

ESTIMATORS = (TorchEstimator, KerasEstimator, LightningEstimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_store_is_needed_before_anything_is_sent(
    estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ParamError("store is not set.")

    monkeypatch.setattr(settings_module, "default_store", missing)
    model = keras_net(1) if estimator is KerasEstimator else torch_net(1)
    with pytest.raises(ParamError, match="store is not set"):
        Fit(estimator(model=model, loss="mse" if estimator is KerasEstimator else None)).check()


def test_credentials_among_the_params_are_not_shown() -> None:
    settings = Fit(KerasEstimator(model=keras_net(1), backend_env={"TOKEN": "hidden"})).settings
    assert "hidden" not in repr(settings)
    assert settings.get("backend_env") == {"TOKEN": "hidden"}


def result(digest: str = "a", state: bytes | None = b"weights") -> TrainResult:
    return TrainResult(digest, state, (EpochMetrics(0, {"loss": 1.0}),))


def test_results_with_different_weights_have_no_state() -> None:
    with pytest.raises(HvdEstimatorsError, match="ended with different weights"):
        _ = RunResults([result(), result("b")], None).state
    with pytest.raises(ResultsError, match="Rank 0 returned no trained state"):
        _ = RunResults([result(state=None), result()], None).state


def torch_net(hidden):
    return torch.nn.Linear(3, hidden)


def keras_net(hidden):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(hidden)])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def with_objects(estimator):
    return estimator.framework_class.with_objects(estimator)


def weights(estimator):
    """Return the first weights of the model that a fit would train."""
    model = with_objects(estimator).getModel()
    if isinstance(model, keras.Model):
        return model.get_weights()[0]
    return model.weight.detach().numpy()


@pytest.mark.parametrize(
    ("cls", "params"),
    [
        (TorchEstimator, {"model": torch_net, "optimizer": sgd}),
        (LightningEstimator, {"model": torch_net, "optimizer": sgd}),
        (KerasEstimator, {"model": keras_net}),
    ],
)
def test_the_seed_determines_the_initial_weights(cls, params):
    estimator = cls(**params, model_args={"hidden": 2}, random_seed=3)
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    first = weights(estimator)
    assert 2 in first.shape
    np.testing.assert_array_equal(weights(estimator), first)
    assert (random.getstate(), str(np.random.get_state())) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert not np.array_equal(weights(estimator.copy({"random_seed": 4})), first)
    assert estimator.getModel() is params["model"]

    unseeded = estimator.copy({"random_seed": None})
    assert not np.array_equal(weights(unseeded), weights(unseeded))


def test_the_optimizer_is_built_for_the_parameters_of_the_model():
    given = torch_net(2)
    estimator = with_objects(TorchEstimator(model=given, optimizer=torch.optim.Adagrad))
    (group,) = estimator.getOptimizer().param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in given.parameters()]
    assert estimator.getModel() is given
