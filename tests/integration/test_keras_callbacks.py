"""Callbacks behave the same on all ranks, and fits return the best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from reference import write_rows

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import BestModelCheckpoint

pytestmark = pytest.mark.integration


class Diary(keras.callbacks.Callback):
    """Callback that logs epochs to a file per rank."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = directory

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import os

        with open(f"{self.directory}/{os.environ['HOROVOD_RANK']}", "a") as file:
            rate = float(self.model.optimizer.learning_rate)
            print(epoch, sorted(logs.items()), rate, file=file)


class StopsOneRank(keras.callbacks.Callback):
    """Callback that stops rank 1 in the middle of the third epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        import os

        if os.environ["HOROVOD_RANK"] == "1" and self.seen == 2 and batch == 1:
            self.model.stop_training = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen = epoch


class Evaluates(keras.callbacks.Callback):
    """Callback that evaluates rows of its own in every epoch, and keeps the last loss by rank."""

    def __init__(self, directory: str, rows: Any, rank_zero_only: bool) -> None:
        super().__init__()
        self.directory, self.rows, self.rank_zero_only = directory, rows, rank_zero_only

    def on_test_end(self, logs: Any = None) -> None:
        self.found = self.model.evaluate(*self.rows, batch_size=7, verbose=0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import os

        again = self.model.evaluate(*self.rows, batch_size=7, verbose=0)
        batch = self.model.test_on_batch(*self.rows)
        with open(f"{self.directory}/{os.environ['HOROVOD_RANK']}", "w") as file:
            print(self.found, again, batch, file=file)


class Largest(keras.metrics.Metric):
    """The largest output, which is no sum."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.most.value


class Above(Largest):
    """The number of outputs above 0."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 0, "float32")))


def test_callbacks_see_equal_logs_and_only_one_rank_writes(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 101)
    write_rows(Path(store.get_val_data_path()), 31, seed=1)
    diary = tmp_path / "diary"
    diary.mkdir()
    fitted = pooled_estimator(
        store,
        2,
        batch_size=16,
        epochs=9,
        validation=0.1,
        metrics=["mae"],
        run_id="noted",
        scale_learning_rate=True,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=1e9, factor=0.5),
            keras.callbacks.EarlyStopping(patience=30, restore_best_weights=True),
            keras.callbacks.TensorBoard("elsewhere"),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
            keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
            StopsOneRank(),
            Diary(str(diary)),
        ],
    ).fit_on_parquet()
    pages = [(diary / str(rank)).read_text() for rank in range(2)]
    assert pages[0] == pages[1]
    # A stop on one rank in the third epoch ends all ranks after it.
    assert len(fitted.getHistory()["loss"]) == 3
    np.testing.assert_allclose(fitted.getHistory()["learning_rate"], [0.05, 0.05, 0.025])
    logs = Path(store.get_logs_path("noted"))
    assert list(logs.glob("train/events*"))
    assert list(logs.glob("validation/events*"))
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == [
        f"{epoch}.keras" for epoch in (1, 2, 3)
    ]
    assert_same_weights(
        keras.saving.load_model(tmp_path / "3.keras", compile=False), fitted.getModel()
    )


def test_the_best_model_is_returned_after_a_restart(store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 64)
    held_out = write_rows(Path(store.get_val_data_path()), 20, seed=1)

    # Keras numbers its generated names across all tests.
    def fit(epochs: int, metric: Any = Above) -> Any:
        def rate(epoch: int) -> float:
            # Two good epochs, and then gradient ascent.
            return 0.05 if epoch < 2 else -0.05

        return pooled_estimator(
            store,
            2,
            batch_size=16,
            epochs=epochs,
            validation=0.1,
            run_id="best",
            metrics=[metric(name=metric.__name__.lower())],
            callbacks=[keras.callbacks.LearningRateScheduler(rate)],
            checkpoint_callback=BestModelCheckpoint(),
        ).fit_on_parquet()

    with pytest.raises(ParamError, match=r"'largest'.*cannot be added up over ranks"):
        fit(2, Largest)
    fit(2)
    fitted = fit(3)
    losses = fitted.getHistory()["val_loss"]
    assert losses[1] == min(losses) < losses[2]
    model = fitted.getModel()
    loss, above = model.evaluate(held_out["features"], held_out["label"], verbose=0)
    assert loss == pytest.approx(losses[1], rel=1e-5)
    assert above == fitted.getHistory()["val_above"][1]


def squared_loss(reduction: str) -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction=reduction)


@pytest.mark.parametrize("rank_zero_only", [False, True])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_a_callback_evaluates_rows_of_its_own(
    store: Any, tmp_path: Path, reduction: str, rank_zero_only: bool
) -> None:
    write_rows(Path(store.get_train_data_path()), 64)
    write_rows(Path(store.get_val_data_path()), 20, seed=1)
    own = write_rows(tmp_path / "own", 31, seed=2)
    rows = own["features"], own["label"][:, None]
    found = tmp_path / "found"
    found.mkdir()

    def fit(*callbacks: keras.callbacks.Callback) -> Any:
        return pooled_estimator(
            store,
            2,
            batch_size=16,
            epochs=2,
            validation=0.1,
            optimizer=keras.optimizers.SGD(0.001),
            loss=squared_loss(reduction),
            callbacks=[*callbacks],
        ).fit_on_parquet()

    fitted = fit(Evaluates(str(found), rows, rank_zero_only))

    # The last validation comes after the last step.
    alone = fitted.getModel()
    alone.compile(loss=squared_loss(reduction))
    evaluated = alone.evaluate(*rows, batch_size=7, verbose=0)
    expected = [evaluated, evaluated, alone.test_on_batch(*rows)]
    pages = [[float(n) for n in page.read_text().split()] for page in sorted(found.iterdir())]
    assert len(pages) == 2 - rank_zero_only
    for page in pages:
        np.testing.assert_allclose(page, expected, rtol=1e-5)
    assert fitted.getHistory() == fit().getHistory()
