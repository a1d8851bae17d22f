"""Copies of Keras objects from a config, a constructor or the function that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.keras.custom_objects import remember
from hvd_estimators.keras.serialization import copy_model, dump, load

ROWS = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)


class Power(keras.losses.Loss):
    """Loss without get_config: Keras would create another one with power 2."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** self.power, axis=-1)


class Above(keras.metrics.Metric):
    def __init__(self, limit: float = 0.0, name: str = "above", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.limit = limit
        self.counts = [self.add_weight(initializer="zeros") for _ in range(2)]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "limit": self.limit}

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        hits = keras.ops.cast(y_pred > self.limit, "float32")
        self.counts[0].assign_add(keras.ops.sum(hits))
        self.counts[1].assign_add(keras.ops.sum(keras.ops.ones_like(hits)))

    def result(self) -> Any:
        return self.counts[0] / self.counts[1]


class Wrapping(keras.Model):
    """Model that wraps a model and has no get_config."""

    def __init__(self, inner: keras.Model, extra: list[Any]) -> None:
        super().__init__()
        self.inner = inner
        self.extra = extra
        self.temperature = 1.0
        self.noise = keras.layers.Dropout(0.5, seed=3)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.noise(self.inner(x), training=training)
        for layer in self.extra:
            x = layer(x)
        return x / self.temperature


def make_wrapping() -> Wrapping:
    x = keras.Input((3,))
    shared = keras.layers.Dense(3, activation="tanh")
    inner = keras.Model(x, shared(keras.layers.BatchNormalization()(shared(x))))
    model = Wrapping(inner, [keras.layers.Dense(3), keras.layers.Dense(1)])
    model.temperature = 4.0
    return model


def made(function: Any) -> Any:
    """Return a function's model, as the estimator gets it."""
    model = function()
    remember(model, function)
    return model


def test_functions_make_models_without_a_config(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    model = made(make_wrapping)
    inner = model.inner
    model.compile(keras.optimizers.Adam(0.1), Power(3.0), metrics=[Above(0.5)])
    model.fit(ROWS, ROWS[:, :1], verbose=0)
    copy = load(dump(model))
    assert copy.temperature == 4.0
    assert copy.inner.layers[1] is copy.inner.get_layer(index=1)
    assert len(copy.inner.weights) == len(inner.weights)
    assert [v.path for v in copy.variables] == [v.path for v in model.variables]
    np.testing.assert_array_equal(copy.predict(ROWS, verbose=0), model.predict(ROWS, verbose=0))
    # TensorFlow's compiled functions are not serialized.
    later = copy_model(model)
    np.testing.assert_array_equal(later.predict(ROWS, verbose=0), model.predict(ROWS, verbose=0))
    # Both continue identically, dropout included, and independently.
    before = [variable.numpy() for variable in model.variables]
    copy.fit(ROWS, ROWS[:, :1], verbose=0)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    model.fit(ROWS, ROWS[:, :1], verbose=0)
    for a, b in zip(copy.variables, model.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6, err_msg=a.path)
    # The functional part still has a config, and weights can be saved.
    again = keras.Model.from_config(copy.inner.get_config())
    assert again.count_params() == inner.count_params()
    copy.save_weights(tmp_path / "copy.weights.h5")
    model.load_weights(tmp_path / "copy.weights.h5")


class Caller(keras.layers.Layer):
    """Layer as in Keras's ViT example: an argument missing from the config, and no name."""

    def __init__(self, units: int, depth: int) -> None:
        super().__init__()
        self.units = units
        self.parts = [keras.layers.Dense(units) for _ in range(depth)]

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x))
        for part in self.parts:
            x = part(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


class Bare(keras.Model):
    """Model as in tutorials: a constructor without arguments, and a loss added in call()."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Caller(4, 2)
        self.last = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.inner(x))


class Functional(keras.Model):
    """Model that builds its graph in its constructor."""

    def __init__(self, width: int = 2) -> None:
        x = keras.Input((3,))
        super().__init__(x, keras.layers.Dense(1)(keras.layers.Dense(width)(x)))
        self.width = width


class Rejected(keras.Model):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.renamed = inner

    def call(self, x: Any) -> Any:
        return self.renamed(x)


@pytest.mark.parametrize("kind", [Bare, Functional])
def test_constructors_without_arguments_make_models_again(kind: Any) -> None:
    model = kind()
    model.compile("sgd", "mse")
    expected = model.predict(ROWS, verbose=0)
    copy = copy_model(model)
    np.testing.assert_array_equal(copy.predict(ROWS, verbose=0), expected)
    model.evaluate(ROWS, ROWS[:, :1], verbose=0)
    for again in (copy_model(model), load(dump(model))):
        np.testing.assert_array_equal(again.predict(ROWS, verbose=0), expected)
    copy(ROWS)
    model(ROWS)
    assert [float(v) for v in copy.losses] == [float(v) for v in model.losses]


class OtherLoss(keras.Model):
    """Model with a constructor whose argument is in no config and in no attribute."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(width)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compile(self, *arguments: Any, **named: Any) -> None:
        super().compile(*arguments, **named)


def test_errors_name_what_makes_no_equal_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    monkeypatch.setattr(keras, "once", net, raising=False)
    cases: list[tuple[keras.Model, str]] = [
        (built(Rejected(keras.layers.Dense(1))), r"no get_config\(\) .*'inner'; write def get_c"),
        (Functional(5), r"no get_config\(\) .*'width'"),
        (built(OtherLoss()), r"its own compile\(\).*; set model to a function that makes and"),
        (made(lambda: keras.once), "returns the same model each time"),
    ]
    for model, message in cases:
        with pytest.raises(ValueError, match=message):
            copy_model(model)
    wider = built(OtherLoss(3))
    remember(wider, OtherLoss)
    with pytest.raises(ValueError, match=r"shape \(3, 3\).*in a copy, \(3, 2\)"):
        copy_model(wider)


def built(model: keras.Model) -> keras.Model:
    model(ROWS)
    return model


class Renamed(keras.metrics.Metric):
    def __init__(self, limit: float = 0.0, name: str = "renamed") -> None:
        super().__init__(name=name)
        self.bound = limit

    def result(self) -> Any:
        return 0.0


class Uphill(keras.optimizers.SGD):
    def __init__(self, learning_rate: Any = 0.01, sign: float = 1.0, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self.direction = sign


class Capping(keras.constraints.Constraint):
    def __init__(self, cap: float = 100.0) -> None:
        self.cap = cap

    def __call__(self, w: Any) -> Any:
        return w


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        (Renamed(0.5), "limit"),
        (Uphill(sign=-1.0), "sign"),
        (
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, bias_constraint=Capping())]),
            "cap",
        ),
    ],
)
def test_settings_that_no_config_has_are_named(value: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"write def get_config.*'{argument}': ..."):
        dump(value)


def test_estimator_errors_name_the_param_that_lost_a_setting() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    common: dict[str, Any] = {
        "model": model,
        "loss": "mse",
        "feature_cols": ["x"],
        "label_cols": ["y"],
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": "sgd", "metrics": [Renamed(0.5)]}, r"metrics: .*'limit'.*get_config\(\)"),
        ({"optimizer": Uphill(sign=-1.0)}, r"optimizer: .*'sign'.*get_config\(\)"),
    ]
    for params, message in cases:
        with pytest.raises(ParamError, match=message):
            Fit(KerasEstimator(**common, **params)).settings.compile_settings()


@pytest.mark.parametrize("scales", [False, True])
def test_the_loss_of_a_compiled_optimizer_is_scaled_as_the_user_said(scales: bool) -> None:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, other = (
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]) for _ in range(2)
        )
        model.compile(keras.optimizers.Adam(0.1), "mse", auto_scale_loss=scales)
        model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=6, verbose=0)
        given = {"model": model, "feature_cols": ["x"], "label_cols": ["y"]}
        Fit(KerasEstimator(**given)).settings.compile_settings().apply(other, None)
    finally:
        keras.config.set_dtype_policy(policy)
    assert type(other.optimizer) is type(model.optimizer)
    for found, expected in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
    kind = "LossScaleOptimizer" if scales else "Adam"
    assert type(other.optimizer).__name__ == kind
