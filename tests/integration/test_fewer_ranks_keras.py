"""4 canonical shards on fewer ranks: the same rows in the same steps, the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fewer_ranks import FourShards, fits_of_the_same_steps, note
from rank_pool import shared_ranks
from reference import WIDTH, write_rows

from hvd_estimators.compat.callbacks import LearningRateWarmupCallback
from hvd_estimators.keras import KerasEstimator

pytestmark = [pytest.mark.soak, pytest.mark.integration]


class FourShardsEstimator(FourShards, KerasEstimator):
    pass


class Noting(keras.layers.Layer):
    """Layer that records the ids of a rank's training rows."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder = folder

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "folder": self.folder}

    def call(self, x: Any, ids: Any, training: bool = False) -> Any:
        import os

        if not training or "HOROVOD_RANK" not in os.environ:
            return x

        def take_down(values: Any) -> np.int32:
            note(self.folder, int(os.environ["HOROVOD_RANK"]), values.numpy())
            return np.int32(0)

        with tf.control_dependencies([tf.py_function(take_down, [ids], tf.int32)]):
            return tf.identity(x)


class Batches(keras.callbacks.Callback):
    """Callback that checks the batch numbers it receives, which are the same on all ranks."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert np.isfinite(logs["loss"])
        self.seen.append(-batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self.seen == [0, 0, 1, -1, 2, -2], self.seen


def make_net(folder: str) -> keras.Model:
    keras.utils.set_random_seed(7)
    x, ids = keras.Input((WIDTH,), name="features"), keras.Input((), name="id", dtype="int64")
    inner = keras.layers.Dense(8)(Noting(folder)(x, ids))
    inner = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization(momentum=0.9)(inner))
    return keras.Model([x, ids], keras.layers.Dense(1)(inner))


@pytest.mark.parametrize("collectives", ["horovod", "torch"])
def test_fewer_ranks_train_the_same(store: Any, tmp_path: Path, collectives: str) -> None:
    write_rows(Path(store.get_train_data_path()), 58)
    write_rows(Path(store.get_val_data_path()), 7, seed=1)

    def fit(ranks: int, folder: Path) -> Any:
        estimator = FourShardsEstimator(
            backend=shared_ranks(ranks, "tensorflow"),
            store=store,
            model=make_net(str(folder)),
            custom_objects={"Noting": Noting},
            optimizer=keras.optimizers.SGD(0.001, momentum=0.9),
            loss="mse",
            metrics=["mae"],
            callbacks=[Batches(), LearningRateWarmupCallback(warmup_epochs=1)],
            feature_cols=["features", "id"],
            label_cols=["label"],
            validation=0.5,
            batch_size=5,
            val_batch_size=1,
            backward_passes_per_step=2,
            epochs=2,
            random_seed=3,
            verbose=0,
            collectives=collectives,
        )
        return estimator.fit_on_parquet()

    found = fits_of_the_same_steps(tmp_path, fit)
    net, history = found[4].getModel(), found[4].getHistory()
    for ranks in (3, 2, 1):
        same_net, same_history = found[ranks].getModel(), found[ranks].getHistory()
        for value, same in zip(net.weights, same_net.weights, strict=True):
            np.testing.assert_allclose(
                same.numpy(), value.numpy(), rtol=1e-6, atol=1e-6, err_msg=f"{ranks}: {value.path}"
            )
        assert same_history.keys() == history.keys() >= {"loss", "val_loss", "mae", "val_mae"}
        for name, values in history.items():
            assert same_history[name] == pytest.approx(values, rel=1e-5), name
