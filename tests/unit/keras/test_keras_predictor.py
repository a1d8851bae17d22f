"""Keras predictions in a worker: precision, forms of outputs, failures and devices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.exceptions import GpuError, PredictionError, ShapeError
from hvd_estimators.inference.batch import Resources
from hvd_estimators.keras import KerasModel
from hvd_estimators.keras.predictor import choose_device, reduce_precision

ROWS = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


class Both(NamedTuple):
    b: Any
    a: Any


@keras.saving.register_keras_serializable("test_keras_predictor")
class Returning(keras.Model):
    """Model that returns the first two numbers of a row, doubled, in some form."""

    def __init__(self, form: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.form = form

    def get_config(self) -> dict[str, Any]:
        return {"form": self.form}

    def call(self, x: Any) -> Any:
        a, b = x[:, 0], 2 * x[:, :2]
        half = keras.ops.cast(b, "bfloat16")
        whole = keras.ops.cast(100 * a, "int64")
        forms: dict[str, Callable[[], Any]] = {
            "dict": lambda: {"b": b, "a": a},
            "list": lambda: [a, b],
            "tuple": lambda: (a, b),
            "named": lambda: Both(b, a),
            "types": lambda: (whole, half),
            "text": lambda: (tf.strings.as_string(a), b),
        }
        return forms[self.form]()


@keras.saving.register_keras_serializable("test_keras_predictor")
class Preparing(keras.Sequential):
    """Model that prepares what its own methods get, as keras-hub's models do."""

    def predict_on_batch(self, x: Any) -> Any:
        return super().predict_on_batch(100 * x)


def predictor(model: keras.Model, **params: Any) -> Any:
    given = {"feature_columns": ["x"], "label_columns": ["y"], **params}
    document, load = KerasModel(model=model, **given)._make_predictor()
    return load(document)


def net() -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(32, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3)])


@pytest.mark.parametrize("overlaps", [False, True])
def test_columns_are_not_prepared_once_more(overlaps: bool) -> None:
    model = Preparing([keras.Input((8,)), keras.layers.Dense(3, activation="tanh")])
    kernel, bias = (variable.numpy() for variable in model.variables)

    returning = predictor(model)
    # As on a GPU.
    returning.overlaps = overlaps

    (found,) = returning([ROWS])
    np.testing.assert_allclose(found, np.tanh(ROWS @ kernel + bias), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("precision", "digits"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_agrees_with_float32_within_rounding(precision: str, digits: float) -> None:
    model = net()
    exact = model.predict_on_batch(ROWS)

    (found,) = predictor(model, inference_precision=precision)([ROWS])

    assert found.dtype == np.float32
    error = np.abs(found - exact).max()
    assert digits / 64 < error < 8 * digits
    (same,) = predictor(model)([ROWS])
    np.testing.assert_array_equal(same, exact)
    # The driver's model does not change.
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


def test_inputs_are_normalized_before_they_are_rounded() -> None:
    far = ROWS.astype(np.float64) + 1e5
    normalize = keras.layers.Normalization()
    normalize.adapt(far)
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model = keras.Sequential([keras.Input((8,)), normalize, inner, keras.layers.Dense(2)])
    exact = model.predict_on_batch(far.astype(np.float32))

    reduce_precision(model, "bfloat16")
    model.make_predict_function(force=True)

    found = model.predict_on_batch(far.astype(np.float32))
    assert found.dtype != np.float32
    np.testing.assert_allclose(found.astype(np.float32), exact, atol=0.1)
    assert [layer.compute_dtype for layer in model.layers] == ["float32", "float32", "bfloat16"]
    assert inner.layers[0].compute_dtype == "bfloat16"


@pytest.mark.parametrize("form", ["dict", "list", "tuple", "named"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_outputs_of_any_form_match_the_labels(form: str, overlaps: bool) -> None:
    returning = predictor(Returning(form), label_columns=["a", "b"])
    # As on a GPU: two batches start before the first wait.
    returning.overlaps = overlaps
    begun = [returning.begin([ROWS]), returning.begin([ROWS[:3]])]
    for finish, rows in zip(begun, (ROWS, ROWS[:3]), strict=True):
        a, b = finish()
        np.testing.assert_array_equal(a, rows[:, 0])
        np.testing.assert_array_equal(b, 2 * rows[:, :2])


def test_numbers_of_any_type_are_kept_and_text_is_rejected() -> None:
    whole, half = predictor(Returning("types"), label_columns=["a", "b"])([ROWS])
    np.testing.assert_array_equal(whole, np.trunc(100 * ROWS[:, 0]))
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, 2 * ROWS[:, :2], rtol=2**-8)
    with pytest.raises(ShapeError, match="returns text"):
        predictor(Returning("text"), label_columns=["a", "b"])([ROWS])


def test_errors_in_a_call_describe_given_and_expected_inputs() -> None:
    failing = predictor(net())
    with pytest.raises(PredictionError) as failed:
        failing([ROWS[:, :5]])
    message = str(failed.value)
    assert "called with x (64, 5) float32, and takes x (8,) float32 per row." in message
    assert isinstance(failed.value.__cause__, ValueError)


class Config:
    """Fake ``tf.config`` with two GPUs that records calls."""

    def __init__(self, gpus: int, begun: bool = False) -> None:
        self.gpus, self.begun, self.told = gpus, begun, dict[str, Any]()
        self.threading = SimpleNamespace(
            set_intra_op_parallelism_threads=lambda n: self.tell("intra", n),
            set_inter_op_parallelism_threads=lambda n: self.tell("inter", n),
        )
        self.experimental = SimpleNamespace(set_memory_growth=self.tell)

    def tell(self, what: str, value: Any) -> None:
        if self.begun:
            raise RuntimeError("cannot be modified after being initialized")
        self.told[what] = value

    def list_physical_devices(self, kind: str) -> list[str]:
        return [f"gpu {i}" for i in range(self.gpus)]

    def set_visible_devices(self, devices: list[str], kind: str) -> None:
        self.tell("visible", devices)


@pytest.mark.parametrize(
    ("gpus", "resources", "device", "told"),
    [
        (0, Resources(), "cpu:0", {"visible": []}),
        (2, Resources(2), "cpu:0", {"intra": 2, "inter": 2, "visible": []}),
        (0, Resources(1, gpu=0), "cpu:0", {"intra": 1, "inter": 1, "visible": []}),
        (2, Resources(gpu=1), "gpu:1", {"gpu 0": True, "gpu 1": True}),
    ],
)
def test_tensorflow_uses_the_tasks_gpu_or_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: int, resources: Resources, device: str, told: Any
) -> None:
    config = Config(gpus)
    monkeypatch.setattr(tf, "config", config)
    assert choose_device(resources) == device
    assert config.told == told
    # Later tasks of the worker, when the configuration is final.
    config.begun = True
    assert choose_device(resources) == device


def test_an_invisible_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "config", Config(1))
    with pytest.raises(GpuError, match=r"GPU 1 to this task.* sees 1"):
        choose_device(Resources(gpu=1))
