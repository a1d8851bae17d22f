"""Steps per second of Keras training on two ranks, against a hand-written loop.

Both have the same rows, network, optimizer and batches. The hand-written loop has its rows in
memory; the trainer reads Parquet. They run in turns, and the best epoch of each counts. The first
epoch of each turn, in which TensorFlow traces, is left out.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from benchmarks.common import (
    HIDDEN,
    WIDTH,
    Net,
    squared_error,
    training_options,
    write_regression_data,
)
from benchmarks.figures import compared, seconds, show_result, show_table
from hvd_estimators import Store
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import TorchEstimator

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
LEARNING_RATE = 1e-3


class Clock(keras.callbacks.Callback):
    """Add the seconds of each epoch to the logs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["seconds"] = time.perf_counter() - self.started


def make_net() -> keras.Model:
    keras.utils.set_random_seed(11)
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def by_hand(folder: str, batch_size: int, epochs: int) -> list[float]:
    """Train with only Keras, ``tf.data`` and Horovod; return the seconds of each epoch."""
    import os

    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    features, labels = (
        np.load(f"{folder}/{name}.npy")[hvd.rank() :: hvd.size()] for name in ("features", "label")
    )
    rows = tf.data.Dataset.from_tensor_slices((features, labels[:, None]))
    batches = rows.shuffle(10_000, seed=1).batch(batch_size).prefetch(tf.data.AUTOTUNE)
    model = make_net()
    optimizer = keras.optimizers.Adam(LEARNING_RATE * hvd.size())
    loss, measured = keras.losses.MeanSquaredError(), keras.metrics.Mean()

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(hvd.grouped_allreduce(gradients), model.trainable_variables)
        measured.update_state(value)

    taken = []
    for _ in range(epochs):
        started = time.perf_counter()
        measured.reset_state()
        for x, y in batches:
            step(x, y)
        hvd.allreduce(measured.result(), name="loss")
        taken.append(time.perf_counter() - started)
    hvd.shutdown()
    return taken


def fit(store: Store, ranks: int, batch_size: int, epochs: int) -> list[float]:
    """Train with the estimator; return the seconds of each epoch."""
    fitted = KerasEstimator(
        backend=LocalBackend(ranks, env=QUIET),
        store=store,
        model=make_net(),
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss="mse",
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=batch_size,
        epochs=epochs,
        random_seed=1,
        callbacks=[Clock()],
        verbose=0,
    ).fit_on_parquet()
    return fitted.getHistory()["seconds"]


def fit_torch(store: Store, ranks: int, batch_size: int, epochs: int) -> None:
    """Train the same network with `TorchEstimator`."""
    net = Net()
    TorchEstimator(
        backend=LocalBackend(ranks),
        store=store,
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=LEARNING_RATE),
        loss=squared_error,
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=batch_size,
        epochs=epochs,
        random_seed=1,
        verbose=0,
    ).fit_on_parquet()


def main() -> None:
    given, steps = training_options(__doc__)
    speeds: dict[str, list[float]] = {"trainer": [], "hand-written loop": []}
    whole: dict[str, list[float]] = {"KerasEstimator": [], "TorchEstimator": []}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        store = Store.create(f"{directory}/store")
        write_regression_data(folder, Path(store.get_train_data_path()), given.rows)
        for _ in range(given.repeats):
            taken = LocalBackend(given.ranks, env=QUIET).run(
                by_hand, (str(folder), given.batch_size, given.epochs)
            )
            slowest = [max(epoch) for epoch in zip(*taken, strict=True)]
            speeds["hand-written loop"].append(steps / min(slowest[1:]))
            how = (store, given.ranks, given.batch_size, given.epochs)
            started = time.perf_counter()
            epochs = fit(*how)
            took = time.perf_counter() - started
            speeds["trainer"].append(steps / min(epochs[1:]))
            whole["KerasEstimator"].append(took)
            whole["TorchEstimator"].append(seconds(lambda how=how: fit_torch(*how)))
    steps_records = compared("steps", speeds, "steps/s", "hand-written loop")
    whole_records = compared("the whole of fit_on_parquet", whole, "s", "TorchEstimator")
    ratio = steps_records[0].ratio
    show_table(
        f"Keras, {given.ranks} ranks, batches of {given.batch_size} rows, steps per second",
        ["", "steps/s"],
        [[one.name, one.value] for one in steps_records],
    )
    show_table(
        f"The whole of fit_on_parquet, {given.epochs} epochs, seconds",
        ["", "seconds"],
        [[one.name, one.value] for one in whole_records],
    )
    print(f"\ntrainer / hand-written loop: {ratio:.2f} (target: 0.9)")
    figures = {"steps_per_second": speeds, "ratio": ratio, "seconds": whole}
    show_result("keras", vars(given), figures, [*steps_records, *whole_records])


if __name__ == "__main__":
    main()
