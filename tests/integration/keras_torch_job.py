"""Fits of KerasEstimator with KERAS_BACKEND=torch, each beside one process of plain Keras."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from exactness import write_all
from keras_exactness import CELLS, check
from keras_reference import OPTIMIZERS, assert_same_weights, make_estimator, train_alone
from parquet_files import write_columns
from pyspark.sql import SparkSession
from rank_pool import end_shared_ranks, shared_ranks
from reference import WIDTH, global_batches, write_rows
from resuming import kept_checkpoints
from tracked_buffers import BATCH, EPOCHS, ROWS, KerasTracking, expected_buffers

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import KerasModel, load_predictor
from hvd_estimators.store import LocalStore

CASES: dict[str, Callable[[Any], None]] = {}


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


def assert_equal_weights(found: keras.Model, expected: keras.Model) -> None:
    for a, b in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


def alone(model: keras.Model, inputs: Any, label: Any, batches: Any, weights: Any = None) -> Any:
    """Train a compiled model for two epochs in one process, as plain Keras does."""
    for _ in range(2):
        for rows in batches:
            x = keras.tree.map_structure(lambda array, rows=rows: array[rows], inputs)
            model.train_on_batch(x, label[rows], None if weights is None else weights[rows])
    return model


@case
def cells_of_the_matrix(store: Any) -> None:
    paths = write_all(Path(store.prefix_path) / "rows")
    for kind, situation in CELLS:
        check(shared_ranks(2, "keras"), store, paths, kind, situation, "torch")


@case
def steps_validation_and_saving(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 65)
    held_out = write_rows(Path(store.get_val_data_path()), 3, seed=1)
    estimator = make_estimator(
        store,
        2,
        backend=shared_ranks(2, "keras"),
        optimizer=OPTIMIZERS["adam"](),
        batch_size=16,
        epochs=2,
        validation=0.5,
        metrics=["mae"],
    )
    fitted = estimator.fit_on_parquet()
    batches = global_batches(65, 2, 16)
    expected = train_alone(columns, batches, OPTIMIZERS["adam"](), 2)
    model = fitted.getModel()
    assert_same_weights(model, expected)
    errors = model.predict(held_out["features"], verbose=0)[:, 0] - held_out["label"]
    history = fitted.getHistory()
    np.testing.assert_allclose(history["val_loss"][-1], (errors**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(history["val_mae"][-1], np.abs(errors).mean(), rtol=1e-5)
    again = estimator.copy().setStore(store).fit_on_parquet().getModel()
    assert all(
        (a.numpy() == b.numpy()).all() for a, b in zip(model.weights, again.weights, strict=True)
    )
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    with tempfile.TemporaryDirectory() as folder, spark.getOrCreate():
        fitted.save(f"{folder}/model")
        loaded = KerasModel.load(f"{folder}/model").getModel()
        assert_same_weights(loaded, expected)
        predict = load_predictor(f"{folder}/model")
        found = predict({"features": held_out["features"]})["label__output"]
        np.testing.assert_allclose(np.ravel(found) - held_out["label"], errors, rtol=1e-5)


def wrapped() -> keras.Model:
    torch.manual_seed(3)
    body = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
    )
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.TorchModuleWrapper(body)])


@case
def statistics_of_torch_modules(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    held_out = write_rows(Path(store.get_val_data_path()), 9, seed=1)
    given = {"model": wrapped, "validation": 0.5, "batch_size": 16, "epochs": 1}
    fitted = make_estimator(
        store, 2, backend=shared_ranks(2, "keras"), optimizer=keras.optimizers.SGD(0.0), **given
    ).fit_on_parquet()
    found = fitted.getModel()
    # With a rate of zero, only the statistics change, on each rank by the batches of its rows.
    statistics = []
    for rows in (slice(0, 32), slice(32, 64)):
        (layer,) = wrapped().layers
        module = layer.module.train()
        for half in (slice(0, 16), slice(16, 32)):
            module(torch.from_numpy(columns["features"][rows][half]))
        statistics.append(module[1].running_mean.numpy())
    (layer,) = found.layers
    mean = layer.module[1].running_mean.detach().cpu().numpy()
    np.testing.assert_allclose(mean, np.mean(statistics, axis=0), rtol=1e-5)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(mean, statistics[0], rtol=1e-3)
    errors = found.predict(held_out["features"], verbose=0)[:, 0] - held_out["label"]
    loss = fitted.getHistory()["val_loss"][-1]
    np.testing.assert_allclose(loss, (errors**2).mean(), rtol=1e-5)


class Skipped(keras.layers.Layer):
    """Layer that batches with a negative first number skip, at other steps on each rank."""

    def build(self, shape: Any) -> None:
        self.inner = keras.layers.Dense(shape[-1])
        self.inner.build(shape)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x: Any) -> Any:
        return x + self.inner(x) if float(x[0, 0]) > 0 else x


def skipping() -> keras.Model:
    random.seed(1)
    return keras.Sequential([keras.Input((WIDTH,)), Skipped(), keras.layers.Dense(1)])


@case
def layers_that_some_ranks_skip(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 48)
    first = columns["features"][::4, 0] > 0
    # Of the ranks' first six batches each: one, both, and none uses the layer.
    assert {tuple(pair) for pair in first.reshape(2, 6).T.tolist()} >= {(True, False), (False,) * 2}
    for passes in (1, 2):
        fitted = make_estimator(
            store,
            2,
            backend=shared_ranks(2, "keras"),
            model=skipping(),
            optimizer=OPTIMIZERS["momentum"](),
            batch_size=4,
            epochs=1,
            backward_passes_per_step=passes,
        ).fit_on_parquet()
        expected = skipping()
        optimizer = OPTIMIZERS["momentum"]()
        optimizer.build(expected.trainable_variables)
        for step in range(6 // passes):
            sums: list[Any] = [None] * len(expected.trainable_variables)
            batches = [
                range(step * passes, (step + 1) * passes),
                range(6 + step * passes, 6 + (step + 1) * passes),
            ]
            for batch in [*batches[0], *batches[1]]:
                rows = slice(batch * 4, batch * 4 + 4)
                expected.zero_grad()
                output = expected(columns["features"][rows], training=True)[:, 0]
                ((output - torch.from_numpy(columns["label"][rows])) ** 2).mean().backward()
                for index, variable in enumerate(expected.trainable_variables):
                    if variable.value.grad is not None:
                        own = variable.value.grad / (2 * passes)
                        sums[index] = own if sums[index] is None else sums[index] + own
            with torch.no_grad():
                optimizer.apply(sums, expected.trainable_variables)
        assert_same_weights(fitted.getModel(), expected)


def over_horovod(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 65)
    common = {"batch_size": 16, "epochs": 2, "collectives": "horovod"}
    fitted = make_estimator(store, 2, optimizer=OPTIMIZERS["adam"](), **common).fit_on_parquet()
    batches = global_batches(65, 2, 16)
    expected = train_alone(columns, batches, OPTIMIZERS["adam"](), 2)
    assert_same_weights(fitted.getModel(), expected)


def recurrent() -> keras.Model:
    random.seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(11, 4, mask_zero=True),
            keras.layers.LSTM(5, return_sequences=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case
def masked_sequences(store: Any) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 11, (40, 6)) * (np.arange(6) < rng.integers(1, 7, (40, 1)))
    columns = {"ids": ids, "y": rng.normal(size=(40, 6)).astype("f4")}
    write_columns(Path(store.get_train_data_path()), columns)
    common = {"feature_cols": ["ids"], "label_cols": ["y"], "batch_size": 5, "epochs": 2}
    common["backend"] = shared_ranks(2, "keras")
    model = make_estimator(
        store, 2, model=recurrent(), optimizer=None, loss=None, label_shapes=[[-1, 6, 1]], **common
    ).fit_on_parquet()
    batches = global_batches(40, 2, 5)
    expected = alone(recurrent(), ids, columns["y"][..., None], batches)
    assert_same_weights(model.getModel(), expected)


def tracked() -> keras.Model:
    random.seed(1)
    x = keras.Input((4,))
    hidden = keras.layers.Dense(6)(KerasTracking(name="tracking")(x))
    hidden = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(hidden))
    return keras.Model(x, keras.layers.Dense(1)(hidden))


@case
def resumes_within_epochs_and_on_fewer_ranks(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)

    def run(run_id: str, ranks: int = 2, **params: Any) -> keras.Model:
        given = {"model": tracked(), "optimizer": OPTIMIZERS["adam"](), "batch_size": BATCH}
        given |= {"epochs": EPOCHS, "run_id": run_id, **params}
        return make_estimator(store, ranks, **given).fit_on_parquet().getModel()

    whole = run("kept", checkpoint_every_n_steps=3, keep_checkpoints=99)
    layer = whole.get_layer("tracking")
    expected = expected_buffers(columns)["latest"]
    np.testing.assert_allclose(layer.latest.numpy(), expected, rtol=1e-5)
    runs = {position: run_id for run_id, position in kept_checkpoints(store, "kept")}
    assert_equal_weights(run(runs[1, 32]), whole)
    assert_same_weights(run(runs[0, 48], ranks=1), whole)
    metadata = Path(store.get_run_path("kept"), "metadata.json")
    begun = metadata.read_text().replace('"backend": "torch"', '"backend": "tensorflow"')
    assert begun != metadata.read_text()
    metadata.write_text(begun)
    with pytest.raises(ParamError, match=r"backend tensorflow \(now torch\)"):
        run("kept")


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or CASES:
            with tempfile.TemporaryDirectory() as folder:
                {**CASES, over_horovod.__name__: over_horovod}[name](LocalStore(folder))
            print("passed", name, flush=True)
    finally:
        # This program would wait for them.
        end_shared_ranks()
