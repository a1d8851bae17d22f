"""The dry run's comparison of a model with the ranks' copy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.dry_run import DryRun
from hvd_estimators.keras.serialization import copy_model, dump, load

COLUMNS = {
    "x": np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3),
    "y": np.zeros(2, dtype="float32"),
}


class Shifted(keras.layers.Layer):
    """Layer whose from_config() creates a different layer."""

    def __init__(self, shift: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hidden = keras.ops.convert_to_tensor(shift)

    def call(self, x: Any) -> Any:
        return x + self._hidden

    def get_config(self) -> dict[str, Any]:
        return super().get_config()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = cls(**config)
        made._hidden = keras.ops.convert_to_tensor(0.0)
        return made


def test_frozen_layers_stay_frozen() -> None:
    thawed = keras.layers.Dense(3)
    base = keras.Sequential([keras.Input((3,)), thawed, keras.layers.Dense(3)], name="base")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(base(inputs)))
    base.trainable = False
    thawed.trainable = True
    for copy in (copy_model(model), load(dump(model))):
        frozen, flags = copy.get_layer("base"), [layer.trainable for layer in all_layers(model)]
        assert [layer.trainable for layer in all_layers(copy)] == flags
        assert len(copy.trainable_variables) == len(model.trainable_variables) == 4
        frozen.trainable = True
        assert len(copy.trainable_variables) == 6


def run(*layers: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    estimator = KerasEstimator(
        model=model, optimizer="sgd", loss="mse", feature_cols=["x"], label_cols=["y"]
    )
    Fit(estimator).framework.dry_run(COLUMNS)


def test_lambdas_that_lack_a_module_fail_on_the_driver() -> None:
    with pytest.raises(ShapeError, match=r"(?s)name 'ops' is not defined.*named function"):
        run(keras.layers.Lambda(lambda x: ops.square(x)))


def test_copies_with_other_outputs_are_rejected() -> None:
    # As if Keras had lost something that no check of attributes finds.
    model = keras.Sequential([keras.Input((3,)), Shifted(), keras.layers.Dense(1)])
    copy = copy_model(model)
    model.layers[0]._hidden = keras.ops.convert_to_tensor(2.0)
    dry_run = DryRun(copy, ["x"], ["y"], None, None, original=model)
    with pytest.raises(ParamError, match=r"returns other outputs.*get_config\(\)"):
        dry_run.run(COLUMNS)
