"""Serialization of Keras objects from a config or from constructor arguments."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.keras.serialization import (
    OptimizerPayload,
    copy_model,
    dump,
    load,
)

ROWS = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)


class Power(keras.losses.Loss):
    """Loss without get_config: Keras would create another one with power 2."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** self.power, axis=-1)


class Above(keras.metrics.Metric):
    def __init__(self, limit: float = 0.0, name: str = "above") -> None:
        super().__init__(name=name)
        self.limit = limit
        self.counts = [self.add_weight(initializer="zeros") for _ in range(2)]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        hits = keras.ops.cast(y_pred > self.limit, "float32")
        self.counts[0].assign_add(keras.ops.sum(hits))
        self.counts[1].assign_add(keras.ops.sum(keras.ops.ones_like(hits)))

    def result(self) -> Any:
        return self.counts[0] / self.counts[1]


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate / (1.0 + keras.ops.cast(step, "float32"))


class SignedSGD(keras.optimizers.SGD):
    def __init__(self, learning_rate: Any = 0.01, sign: float = 1.0) -> None:
        super().__init__(learning_rate, momentum=0.5)
        self.sign = sign

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(self.sign * gradient, variable, learning_rate)


class Filled(keras.initializers.Initializer):
    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return keras.ops.full(shape, self.value, dtype)


class Capped(keras.constraints.Constraint):
    def __init__(self, cap: float = 100.0) -> None:
        self.cap = cap

    def __call__(self, w: Any) -> Any:
        return keras.ops.minimum(w, self.cap)


class Penalty(keras.regularizers.Regularizer):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return self.factor * keras.ops.sum(x**2)


class Wrapping(keras.Model):
    """Model that wraps a model, has no get_config, and is changed after construction."""

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


def test_losses_metrics_and_schedules_keep_their_arguments() -> None:
    loss, metric, schedule = load(dump([Power(3.0), Above(0.5), Steps(0.25)]))
    assert float(loss(np.array([[2.0]]), np.array([[0.0]]))) == pytest.approx(8.0)
    metric.update_state(np.zeros(4), np.array([0.2, 0.7, 0.9, 0.4]))
    assert float(metric.result()) == pytest.approx(0.5)
    assert len(metric.variables) == 2
    metric.reset_state()
    assert float(metric.counts[1]) == 0.0
    assert float(schedule(1)) == pytest.approx(0.125)


@pytest.mark.parametrize("built", [False, True])
def test_optimizers_keep_settings_missing_from_their_config(built: bool) -> None:
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = SignedSGD(Steps(1.0), sign=-1.0)
    if built:
        optimizer.apply([np.ones(2, "float32")], [variable])
    document = OptimizerPayload.of(optimizer)
    other, target = document.make(), keras.Variable(variable.numpy())
    document.restore(other, [target])
    for made, of in [(other, target), (optimizer, variable)]:
        made.apply([np.array([1.0, 2.0], "float32")], [of])
    # Uphill, at a falling rate, with the momentum of the previous step.
    np.testing.assert_allclose(target.numpy(), variable.numpy())
    assert target.numpy().tolist() == ([2.0, 2.5] if built else [1.0, 2.0])


def test_layers_keep_initializers_constraints_and_regularizers() -> None:
    model = keras.Sequential(
        [
            keras.layers.Dense(
                2,
                kernel_initializer=Filled(3.0),
                kernel_constraint=Capped(0.5),
                kernel_regularizer=Penalty(0.125),
            )
        ]
    )
    copy = copy_model(model)
    copy.build((None, 3))
    layer = copy.layers[0]
    np.testing.assert_array_equal(layer.kernel.numpy(), np.full((3, 2), 3.0))
    assert float(layer.kernel.constraint(np.array(7.0))) == 0.5
    assert float(copy.losses[0]) == pytest.approx(0.125 * 9 * 6)


def test_models_without_a_config_keep_their_attributes(
    tmp_path: Path,
) -> None:
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    shared = keras.layers.Dense(3, activation="tanh")
    inner = keras.Model(x, shared(keras.layers.BatchNormalization()(shared(x))))
    model = Wrapping(inner, [keras.layers.Dense(3), keras.layers.Dense(1)])
    model.temperature = 4.0
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
    """Model that builds its graph in its constructor and stores its arguments."""

    def __init__(self, width: int = 2, parts: Any = ()) -> None:
        x = y = keras.Input((3,))
        for part in [keras.layers.Dense(width), *parts]:
            y = part(y)
        super().__init__(x, keras.layers.Dense(1)(y))
        self.width = width
        self.parts = parts


class Rejected(keras.Model):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.renamed = inner

    def call(self, x: Any) -> Any:
        return self.renamed(x)


@pytest.mark.parametrize(
    "make",
    [Bare, lambda: Functional(5), lambda: Functional(4, [keras.layers.Dense(6)])],
    ids=["bare", "functional", "functional with layers"],
)
def test_traced_models_with_incomplete_configs_are_restored(make: Any) -> None:
    model = make()
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


def test_errors_name_objects_without_an_equal_copy() -> None:
    shared = keras.layers.Dense(3)
    shared.build((None, 3))
    with pytest.raises(ValueError, match=r"it has the layers Wrapping, .*; a copy, "):
        copy_model(built(Wrapping(keras.Sequential([keras.Input((3,)), shared]), [shared])))
    with pytest.raises(ValueError, match=r"Rejected has no .*; write self.inner = inner"):
        copy_model(built(Rejected(keras.layers.Dense(1))))
    model = built(Bare())
    model.guard = threading.Lock()
    with pytest.raises(ValueError, match="lacks the attribute 'guard' of type lock"):
        copy_model(model)


def built(model: keras.Model) -> keras.Model:
    model(ROWS)
    return model


class Renamed(keras.metrics.Metric):
    """Metric that stores an argument in an attribute of another name."""

    def __init__(self, limit: float = 0.0, name: str = "renamed") -> None:
        super().__init__(name=name)
        self.bound = limit

    def result(self) -> Any:
        return 0.0


class Uphill(keras.optimizers.SGD):
    """Optimizer that stores an argument in an attribute of another name."""

    def __init__(self, learning_rate: Any = 0.01, sign: float = 1.0, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self.direction = sign


@pytest.mark.parametrize(
    ("value", "argument"), [(Renamed(0.5), "limit"), (Uphill(sign=-1.0), "sign")]
)
def test_settings_that_no_attribute_has_are_named(value: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=f"write self.{argument} = {argument}"):
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


def test_deep_models_with_a_part_without_config_are_restored() -> None:
    x = y = keras.Input((2,))
    for _ in range(150):
        y = keras.layers.Add()([keras.layers.Activation("tanh")(y), x])
    model = keras.Model(x, keras.layers.Dense(1, kernel_initializer=Filled(3.0))(y))
    rows = np.array([[0.1, 0.2]], "float32")
    copy = copy_model(model)
    np.testing.assert_array_equal(copy(rows), model(rows))
    assert copy.layers[-1].kernel_initializer.value == 3.0
