"""A function's model trains with losses, metrics and schedules of the user's classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from reference import WIDTH, write_rows

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fit import Fit

pytestmark = pytest.mark.integration


class Power(keras.losses.Loss):
    """Loss that Keras would restore with power 2."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** self.power, axis=-1)


class Above(keras.metrics.Metric):
    def __init__(self, limit: float = 1000.0) -> None:
        super().__init__(name="above")
        self.limit = limit
        self.count = self.add_weight(initializer="zeros")

    def get_config(self) -> dict[str, Any]:
        return {"limit": self.limit}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_pred > self.limit, "float32")))

    def result(self) -> Any:
        return self.count.value


class Slower(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}


class Stretched(keras.Model):
    """Wrapper of a model, without get_config."""

    def __init__(self, inner: keras.Model) -> None:
        super().__init__()
        self.inner = inner
        self.stretch = 1.0

    def call(self, x: Any) -> Any:
        return self.stretch * self.inner(x)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    model = Stretched(keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]))
    model.stretch = 3.0
    model(np.zeros((1, WIDTH), "float32"))
    return model


def test_objects_of_the_users_classes_train_resume_and_save(store: Any, tmp_path: Path) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 128)

    def fit(epochs: int, run_id: str) -> Any:
        return pooled_estimator(
            store,
            2,
            model=make_model,
            optimizer=keras.optimizers.SGD(Slower(0.02), momentum=0.5),
            loss=Power(1.5),
            metrics=[Above(0.5)],
            batch_size=32,
            epochs=epochs,
            run_id=run_id,
        ).fit_on_parquet()

    fit(1, "parts")
    fitted = fit(2, "parts")
    alone = make_model()
    # The ranks read contiguous halves, 32 rows of each for a step.
    order = np.concatenate([np.r_[i : i + 32, 64 + i : 96 + i] for i in (0, 32)])
    alone.compile(
        keras.optimizers.SGD(Slower(0.02), momentum=0.5), Power(1.5), metrics=[Above(0.5)]
    )
    expected = alone.fit(
        columns["features"][order],
        columns["label"][order, None],
        batch_size=64,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    assert_same_weights(fitted.getModel(), alone)
    for name, values in expected.items():
        np.testing.assert_allclose(fitted.getHistory()[name], values, rtol=1e-4)
    assert 0 < expected["above"][-1] < 128

    trained = fitted.getModel()
    (name, weights), *others = fitted._extra_files().items()
    assert name == "model.weights.h5"
    assert not others
    shutil.copy(weights, tmp_path / name)
    alone.load_weights(tmp_path / name)
    again = fitted._load_params({"model": fitted._dump_param("model", trained)})["model"]
    document, load = fitted._make_predictor()
    found = load(document)([columns["features"]])[0]
    for model in (trained, again, alone):
        np.testing.assert_allclose(
            found, model.predict(columns["features"], verbose=0), rtol=1e-5, atol=1e-6
        )
    assert again.loss.power == 1.5


def test_a_model_that_cannot_be_made_again_is_rejected_on_the_driver(store: Any) -> None:
    settings = Fit(pooled_estimator(store, 2, model=make_model())).settings
    expected = r"model: .*Stretched has no get_config\(\) .*'inner'.*Set model to a function"
    with pytest.raises(ParamError, match=expected):
        settings.training_model()
    # An exception that the program handles is not reported as the reason.
    try:
        next(iter(()))
    except StopIteration:
        with pytest.raises(ParamError, match=expected):
            settings.training_model()
