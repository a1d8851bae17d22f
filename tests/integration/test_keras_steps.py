"""Custom steps of Keras's guides, as published, trained and evaluated on ranks.

https://keras.io/guides/custom_train_step_in_tensorflow
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_reference import assert_same_weights, make_estimator
from parquet_files import write_columns
from rank_pool import StandingBackend, shared_ranks
from reference import global_batches

from hvd_estimators.keras import BestModelCheckpoint

pytestmark = pytest.mark.integration

RATE = 0.05


class CustomModel(keras.Model):
    """Going higher-level, and providing your own evaluation step."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class OtherName(keras.Model):
    """keras.io's VAE and VQ-VAE: the step returns a tracker's mean under another name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="total_loss")

    def test_step(self, data: Any) -> Any:
        x, y = data
        error = keras.ops.square(self(x)[:, 0] - keras.ops.reshape(y, (-1,)))
        self.tracker.update_state(error)
        return {"loss": self.tracker.result()}

    def train_step(self, data: Any) -> Any:
        return self.test_step(data)

    @property
    def metrics(self) -> Any:
        return [self.tracker]


class Shares(keras.metrics.Metric):
    """Metric with a dict of results."""

    def __init__(self, name: str = "shares") -> None:
        super().__init__(name=name)
        self.positive = self.add_weight(name="positive", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.positive.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 0.5, "float32")))
        self.rows.assign_add(keras.ops.cast(keras.ops.size(y_pred), "float32"))

    def result(self) -> Any:
        return {"positive": self.positive / self.rows, "negative": 1 - self.positive / self.rows}


def measures() -> dict[str, keras.metrics.Metric]:
    return {
        "roc": keras.metrics.AUC(name="auc"),
        "of_classes": keras.metrics.F1Score(name="f1"),
        "one": keras.metrics.F1Score(threshold=0.5, name="one"),
        "shares": Shares(),
    }


def measure(of_names: dict[str, keras.metrics.Metric], label: Any, outputs: Any) -> dict[str, Any]:
    """Update the metrics, and return results under other names than the metrics'."""
    truth = keras.ops.cast(keras.ops.reshape(label, (-1, 1)) > 0, "float32")
    score = keras.ops.sigmoid(outputs)
    for name in ("roc", "one", "shares"):
        of_names[name].update_state(truth, score)
    both = [keras.ops.concatenate([value, 1 - value]) for value in (truth, score)]
    of_names["of_classes"].update_state(*(keras.ops.hstack([b, 1 - b]) for b in both))
    return {name: of_names[name].result() for name in ("roc", "of_classes", "shares")}


class OwnLogs(keras.Model):
    """Keras's mean of the loss is not updated, and the test step returns no loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measures = measures()

    def train_step(self, data: Any) -> Any:
        x, y = data
        outputs = self(x, training=True)
        loss = keras.ops.mean(keras.ops.square(outputs[:, 0] - keras.ops.reshape(y, (-1,))))
        return {"loss": loss, **measure(self.measures, y, outputs)}

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"distance": keras.ops.mean(y), **measure(self.measures, y, self(x))}

    @property
    def metrics(self) -> Any:
        return [*super().metrics, *self.measures.values()]


def make(cls: type[keras.Model]) -> keras.Model:
    """Return a network with two named inputs, one of them for a kernel on three dimensions."""
    keras.utils.set_random_seed(3)
    series, body = keras.Input((6, 3), name="series"), keras.Input((2,), name="body")
    hidden = keras.layers.Dense(4, activation="tanh")(series)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    joined = keras.layers.Concatenate()([pooled, keras.layers.Dense(2)(body)])
    return cls([series, body], keras.layers.Dense(1)(joined))


def write(path: str, rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    columns = {
        "body": rng.normal(size=(rows, 2)).astype(np.float32),
        "series": rng.normal(size=(rows, 18)).astype(np.float32),
    }
    columns["label"] = columns["series"].sum(axis=1) / 3 - columns["body"][:, 0]
    write_columns(path, columns, row_group_size=9)
    return columns


def inputs_of(columns: dict[str, np.ndarray], rows: Any = slice(None)) -> list[np.ndarray]:
    return [columns["series"][rows].reshape(-1, 6, 3), columns["body"][rows]]


def train_alone(columns: dict[str, np.ndarray], batches: list[np.ndarray]) -> keras.Model:
    """Train in one process, with plain Keras."""
    net, optimizer = make(keras.Model), keras.optimizers.SGD(RATE)
    for rows in batches:
        label = columns["label"][rows, None]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(inputs_of(columns, rows), training=True) - label) ** 2)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
    return net


@pytest.fixture
def backend() -> StandingBackend:
    return shared_ranks(2, "tensorflow")


def fit(backend: Any, store: Any, model: keras.Model, **params: Any) -> Any:
    settings: dict[str, Any] = {
        "backend": backend,
        "model": model,
        "optimizer": None,
        "loss": None,
        # If matched by position, the inputs would be swapped.
        "feature_cols": ["body", "series"],
        "batch_size": 8,
        "val_batch_size": 4,
        "validation": 0.5,
        **params,
    }
    return make_estimator(store, 2, **settings).fit_on_parquet()


def test_the_higher_level_step_matches_one_process(backend: Any, store: Any) -> None:
    columns = write(store.get_train_data_path(), 37, seed=0)
    held_out = write(store.get_val_data_path(), 32, seed=1)
    model = make(CustomModel)
    model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
    fitted = fit(backend, store, model, epochs=2)
    batches = global_batches(37, 2, 8)
    assert_same_weights(fitted.getModel(), train_alone(columns, batches * 2))
    assert len({result.weights_digest for result in backend.results}) == 1
    errors = fitted.getModel()(inputs_of(held_out))[:, 0] - held_out["label"]
    history = fitted.getHistory()
    # All batches have four rows.
    assert history["val_loss"][-1] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert history["val_mae"][-1] == pytest.approx(np.mean(np.abs(errors)), rel=1e-5)


def test_a_renamed_metric_is_the_mean_over_ranks_with_rows(backend: Any, store: Any) -> None:
    columns = write(store.get_train_data_path(), 37, seed=0)
    # One rank has no rows.
    held_out = write(store.get_val_data_path(), 1, seed=1)
    model = make(OtherName)
    model.compile(keras.optimizers.SGD(RATE))
    history = fit(backend, store, model, epochs=1).getHistory()
    for prefix, rows in (("", columns), ("val_", held_out)):
        errors = (model(inputs_of(rows))[:, 0] - rows["label"]) ** 2
        # The ranks have the rows up to 17 and from 18.
        means = [np.mean(own) for own in (errors[:18], errors[18:]) if len(own)]
        assert history[f"{prefix}total_loss"] == [pytest.approx(np.mean(errors), rel=1e-5)]
        assert history[f"{prefix}loss"] == [pytest.approx(np.mean(means), rel=1e-5)]


def test_logs_of_a_step_are_merged_over_the_ranks(backend: Any, store: Any) -> None:
    columns = write(store.get_train_data_path(), 37, seed=0)
    held_out = write(store.get_val_data_path(), 21, seed=1)
    model = make(OwnLogs)
    model.compile(keras.optimizers.SGD(RATE))
    monitor: dict[str, Any] = {"monitor": "val_one", "mode": "max"}
    fitted = fit(
        *(backend, store, model),
        epochs=2,
        callbacks=[keras.callbacks.EarlyStopping(**monitor)],
        checkpoint_callback=BestModelCheckpoint(**monitor),
    )
    history = fitted.getHistory()
    for prefix, rows in (("", columns), ("val_", held_out)):
        label, outputs = rows["label"], model(inputs_of(rows))
        of_names = measures()
        shares = measure(of_names, label, outputs).pop("shares")
        expected = {
            **{of_names[name].name: of_names[name].result() for name in ("roc", "of_classes")},
            **{"one": of_names["one"].result()[0], **shares},
        }
        found = {name: history[prefix + name][0] for name in expected}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    # The ranks have the rows up to 17 and from 18.
    last = [inputs_of(columns, rows) for rows in (slice(16, 18), slice(34, 37))]
    labels = columns["label"][16:18], columns["label"][34:37]
    losses = [np.mean((model(x)[:, 0] - y) ** 2) for x, y in zip(last, labels, strict=True)]
    assert history["loss"] == [pytest.approx(np.mean(losses), rel=1e-5)] * 2
    assert "val_loss" not in history
    assert len(history["val_distance"]) == 2


def mean_error(y_true: Any, y_pred: Any) -> Any:
    """Return one number for a batch, which is NaN without rows."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class Tracked(keras.Model):
    """Step with a tracker of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = mean_error(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> Any:
        return [self.tracker]


@pytest.mark.parametrize("kind", [keras.Model, Tracked])
def test_batches_without_rows_do_not_count_in_means(backend: Any, store: Any, kind: Any) -> None:
    columns = write(store.get_train_data_path(), 7, seed=0)
    write(store.get_val_data_path(), 3, seed=1)

    def compiled() -> Any:
        model, own = make(kind), kind is Tracked
        settings: dict[str, Any] = {} if own else {"loss": mean_error, "metrics": [mean_error]}
        model.compile(keras.optimizers.SGD(RATE), **settings, jit_compile=False)
        return model

    params = {"epochs": 2, "validation": None, "batch_size": 1}
    # The first rank has three rows, and the other four.
    fitted = fit(backend, store, compiled(), **params)
    alone, history = compiled(), fitted.getHistory()
    for epoch in range(2):
        errors: list[Any] = []
        for rows in global_batches(7, 2, 1):
            x, y = inputs_of(columns, rows), columns["label"][rows, None]
            errors.extend(np.abs(alone(x).numpy() - y)[:, 0])
            alone.train_on_batch(x, y)
        for name, values in history.items():
            assert values[epoch] == pytest.approx(np.mean(errors), rel=1e-5), name
    assert set(history) == ({"loss"} if kind is Tracked else {"loss", "mean_error"})
    assert_same_weights(fitted.getModel(), alone)
