"""Class weights on two ranks, compared with `keras.Model.fit` in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from parquet_files import write_columns

from hvd_estimators.exceptions import DataError, ParamError

pytestmark = pytest.mark.integration

WEIGHTS = {0: 4.0, 2: 0.25}


def write(path: str, rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    columns = {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "y": rng.integers(0, 4, rows),
        "w": rng.uniform(0.5, 2.0, size=rows).astype(np.float32),
        "z": rng.normal(size=rows),
    }
    write_columns(path, columns, row_group_size=25)
    return columns


def make_model() -> keras.Model:
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="softmax")])


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_class_weights_train_as_one_process(store: Any, reduction: str) -> None:
    columns = write(store.get_train_data_path(), 60, 0)
    held_out = write(store.get_val_data_path(), 20, 1)
    params = {
        "model": make_model(),
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": keras.losses.SparseCategoricalCrossentropy(reduction=reduction),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "class_weight": WEIGHTS,
        "batch_size": 15,
        "epochs": 2,
        "validation": 0.1,
    }
    weighted = reduction == "sum_over_batch_size"
    fitted = pooled_estimator(
        store, 2, sample_weight_col="w" if weighted else None, **params
    ).fit_on_parquet()
    alone = make_model()
    alone.compile(keras.optimizers.SGD(0.1), params["loss"])
    order = np.concatenate([np.r_[i : i + 15, 30 + i : 45 + i] for i in (0, 15)])
    # Keras accepts only one of the two; a row's weight may be any number.
    product = np.array([WEIGHTS.get(y, 1.0) for y in columns["y"]]) * columns["w"]
    given: Any = {"sample_weight": product[order]} if weighted else {"class_weight": WEIGHTS}
    held_out_weight = (held_out["w"],) if weighted else ()
    # Mean of the batches so far, of each batch.
    means: list[float] = []
    logged = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: means.append(logs["loss"])
    )
    history = alone.fit(
        columns["x"][order],
        columns["y"][order],
        validation_data=(held_out["x"], held_out["y"], *held_out_weight),
        batch_size=30,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[logged],
        **given,
    ).history
    assert_same_weights(fitted.getModel(), alone)
    if not weighted:
        first, both = np.reshape(means, (2, 2)).T
        of_batches = np.reshape([WEIGHTS.get(y, 1.0) for y in columns["y"][order]], (2, 30)).sum(1)
        expected = (np.transpose([first, 2 * both - first]) * of_batches).sum(1) / of_batches.sum()
        np.testing.assert_allclose(fitted.getHistory()["loss"], expected, rtol=1e-5)
        assert np.abs(expected / both - 1).max() > 1e-4
    if weighted:
        for name, values in history.items():
            np.testing.assert_allclose(fitted.getHistory()[name], values, rtol=1e-4, err_msg=name)
        other = {**params, "label_cols": ["z"], "loss": "mse", "validation": None}
        other["model"] = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        with pytest.raises(DataError, match=r"class_weight: .* in column 'z'"):
            pooled_estimator(store, 2, **other).fit_on_parquet()
        with pytest.raises(ParamError, match=r"class_weight: expected a single label, found"):
            pooled_estimator(store, 2, **{**params, "label_cols": ["y", "z"]}).fit_on_parquet()
