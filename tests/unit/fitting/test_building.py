"""Models that are given as functions: initial weights and random states."""

import random

import keras
import numpy as np
import pytest
import torch

from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator


def torch_net(hidden):
    return torch.nn.Linear(3, hidden)


def keras_net(hidden):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(hidden)])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def weights(estimator):
    """Return the first weights of the model that a fit would train."""
    model = estimator._with_objects().getModel()
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
    estimator = TorchEstimator(model=given, optimizer=torch.optim.Adagrad)._with_objects()
    (group,) = estimator.getOptimizer().param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in given.parameters()]
    assert estimator.getModel() is given
