"""Layers that need all ranks, and half precision, compared with Keras in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_reference import assert_same_weights, pooled_estimator, train_alone
from reference import global_batches, write_rows

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.backend import config, configure

pytestmark = pytest.mark.integration


def test_synchronized_batch_normalization_is_an_error(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 8)
    layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
    inner = keras.Sequential([keras.Input((4,)), *layers])
    model = keras.Sequential([keras.Input((4,)), inner])
    with pytest.raises(ParamError, match=r"model: .*Leave synchronized out.*GroupNormalization"):
        pooled_estimator(store, 2, model=model).fit_on_parquet()


class Counting(keras.layers.Layer):
    """Layer with TensorFlow's variable, which Keras does not save, and one of Keras's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batches = tf.Variable(0.0, trainable=False)
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.batches.assign_add(1.0)
        self.kept.assign(self.kept + 1.0)
        return x


def test_variables_that_keras_does_not_save_are_named(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(Path(store.get_train_data_path()), 8)
    layers = [Counting(name="counting"), keras.layers.Dense(1)]
    inner = keras.Sequential([keras.Input((4,)), *layers])
    model = keras.Sequential([keras.Input((4,)), inner])

    fitted = pooled_estimator(store, 2, model=model, batch_size=2, epochs=1).fit_on_parquet()

    (warning,) = [r.getMessage() for r in caplog.records if "tf.Variable" in r.getMessage()]
    assert "assigns to counting.batches. Use add_weight" in warning
    assert float(fitted.getModel().layers[0].layers[0].kept) == 2.0


def embedding_net() -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Discretization([-1.0, 0.0, 1.0]),
            keras.layers.Embedding(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


class SummedAdam(keras.optimizers.Adam):
    """Adam that sums the gradients of an embedding's row; Keras's squares each one."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


def test_gradients_of_embeddings_are_summed_before_the_optimizer(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    estimator = pooled_estimator(
        store,
        2,
        model=embedding_net(),
        optimizer=keras.optimizers.Adam(0.01),
        batch_size=8,
        epochs=2,
    )
    model = estimator.fit_on_parquet().getModel()
    batches = global_batches(64, 2, 8)
    summed, alone = (
        train_alone(columns, batches, optimizer, 2, net=embedding_net())
        for optimizer in (SummedAdam(0.01), keras.optimizers.Adam(0.01))
    )
    assert_same_weights(model, summed)
    # If this fails, Keras sums them, too: the note in the page on Keras is out of date.
    assert np.abs(alone.get_weights()[0] - summed.get_weights()[0]).max() > 1e-3


class Half(keras.Model):
    """Model whose layers use the dtype policy at its construction."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(4)
        self.out = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def bfloat16() -> Iterator[None]:
    keras.config.set_dtype_policy("bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def built(kind: type[keras.Model]) -> keras.Model:
    """Return a model with the same weights each time."""
    keras.utils.set_random_seed(5)
    model = kind()
    model(np.zeros((1, 4)))
    return model


class Pooled(keras.Model):
    """Model whose pooling and loss depend on Keras's settings at construction and calls."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pool = keras.layers.GlobalAveragePooling1D()
        self.out = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.pool(keras.ops.reshape(x, (-1, 2, 2))))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def settings() -> Iterator[dict[str, Any]]:
    before = config()
    configure({"epsilon": 2.0, "image_data_format": "channels_first"})
    yield before
    configure(before)


def test_keras_settings_are_those_of_the_driver_everywhere(store: Any, settings: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    loss, rate = "mean_absolute_percentage_error", 0.01
    estimator = pooled_estimator(
        *(store, 2),
        model=built(Pooled),
        optimizer=keras.optimizers.SGD(rate),
        loss=loss,
        batch_size=8,
    )
    fitted = estimator.fit_on_parquet()
    batches, epochs = global_batches(64, 2, 8), estimator.getEpochs()
    optimizer = keras.optimizers.SGD(rate)
    alone = train_alone(columns, batches, optimizer, epochs, built(Pooled), loss)
    assert_same_weights(fitted.getModel(), alone)
    expected = alone.predict(columns["features"], verbose=0)
    of_loss = alone.evaluate(columns["features"], columns["label"][:, None], verbose=0)
    document, load = fitted._make_predictor()
    evaluated, load_evaluator, combine = fitted._make_evaluator()
    # Like a worker of Spark.
    configure(settings)
    (outputs,) = load(document)([columns["features"]])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    sums = load_evaluator(evaluated).start()
    sums.add(columns)
    _, values = combine([sums.state()])
    assert values["loss"] == pytest.approx(of_loss, rel=1e-4)


def test_a_bfloat16_model_trains_as_one_process(store: Any, bfloat16: None) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    estimator = pooled_estimator(
        store, 2, model=built(Half), optimizer=keras.optimizers.SGD(0.01), batch_size=8, epochs=2
    )
    fitted = estimator.fit_on_parquet()
    batches, optimizer = global_batches(64, 2, 8), keras.optimizers.SGD(0.01)
    alone = train_alone(columns, batches, optimizer, 2, built(Half))
    # Like another process, which has not set the policy.
    keras.config.set_dtype_policy("float32")
    document, load = fitted._make_predictor()
    (outputs,) = load(document)([columns["features"]])
    assert fitted._get_floatx() == "float32"
    assert fitted._get_metadata()["features"]["shape"] == [4]
    model = fitted.getModel()
    assert {str(weight.dtype) for weight in model.weights} == {"bfloat16"}
    assert len({result.weights_digest for result in estimator.getBackend().results}) == 1
    # Each step loses some of the 8 bits.
    expected = alone.predict(columns["features"], verbose=0).astype(np.float32)
    np.testing.assert_allclose(outputs.astype(np.float32), expected, atol=0.15)
    assert fitted.getHistory()["loss"][1] < 0.5 * fitted.getHistory()["loss"][0]
