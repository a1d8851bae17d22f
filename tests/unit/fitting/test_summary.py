"""Summary of a fit: its best epoch, and models without one."""

import math
from dataclasses import replace

import keras
import pytest
import torch
from pytorch_lightning import callbacks as lightning_callbacks

from hvd_estimators.exceptions import ResultsError
from hvd_estimators.keras import BestModelCheckpoint, KerasEstimator
from hvd_estimators.keras.settings import KerasSettings
from hvd_estimators.summary import find_best_epoch, selecting_metric
from hvd_estimators.torch import TorchModel
from hvd_estimators.torch import callbacks as torch_callbacks
from hvd_estimators.training.spec import EpochMetrics


def history(**values):
    """Return epochs with these training and validation metrics, given as lists."""
    names = {name: name.removeprefix("val_") for name in values}
    return [
        EpochMetrics(
            epoch,
            {names[n]: v[epoch] for n, v in values.items() if not n.startswith("val_")},
            {names[n]: v[epoch] for n, v in values.items() if n.startswith("val_")} or None,
        )
        for epoch in range(len(next(iter(values.values()))))
    ]


@pytest.mark.parametrize(
    ("values", "monitor", "mode", "expected"),
    [
        ({"loss": [3.0, 1.0, 2.0]}, None, "auto", 1),
        ({"loss": [3.0, 1.0, 2.0], "val_loss": [1.0, 2.0, 0.5]}, None, "auto", 2),
        ({"loss": [1.0, 2.0], "val_accuracy": [0.1, 0.7]}, "val_accuracy", "auto", 1),
        ({"loss": [1.0, 2.0], "val_accuracy": [0.1, 0.7]}, "accuracy", "min", 0),
        ({"loss": [1.0, 1.0]}, None, "auto", 0),
        ({"loss": [math.nan, 4.0]}, None, "auto", 1),
        ({"loss": [math.nan, math.nan]}, None, "auto", None),
        ({"loss": [1.0, 2.0], "distance": [1.0, 2.0]}, "distance", "auto", None),
        ({"loss": [1.0, 2.0]}, "recall", "auto", None),
    ],
)
def test_best_epoch(values, monitor, mode, expected):
    assert find_best_epoch(history(**values), monitor, mode) == expected


def test_epochs_without_validation_are_not_the_best():
    epochs = history(loss=[0.1, 3.0, 0.2, 2.0], val_loss=[math.nan, 2.0, math.nan, 1.0])
    epochs = [epoch if epoch.epoch % 2 else replace(epoch, validation=None) for epoch in epochs]
    assert find_best_epoch(epochs, None, "auto") == 3
    assert find_best_epoch(epochs, "val_loss", "max") == 1


class MyEarlyStopping(keras.callbacks.EarlyStopping):
    """Callback of a user."""


@pytest.mark.parametrize(
    ("monitor", "callbacks", "expected"),
    [
        (None, None, (None, "min")),
        (None, [keras.callbacks.ReduceLROnPlateau(monitor="val_mae")], (None, "min")),
        (None, [MyEarlyStopping(monitor="val_auc", mode="max")], ("val_auc", "max")),
        ("loss", [MyEarlyStopping(monitor="val_auc", mode="max")], ("loss", "min")),
        (None, [keras.callbacks.ModelCheckpoint("a.keras", "val_auc")], ("val_auc", "auto")),
        (None, [torch_callbacks.EarlyStopping("val_auc", mode="max")], ("val_auc", "max")),
        (
            None,
            [lightning_callbacks.ModelCheckpoint(), lightning_callbacks.EarlyStopping("val_f1")],
            ("val_f1", "min"),
        ),
    ],
)
def test_callbacks_that_select_an_epoch_tell_the_metric(monitor, callbacks, expected):
    assert selecting_metric(monitor, "min", callbacks) == expected


def test_keras_checkpoint_callback_selects_the_epoch():
    stopping = keras.callbacks.EarlyStopping("val_loss")
    given = {"model": keras.Sequential([keras.layers.Dense(1)]), "callbacks": [stopping]}

    def selecting(callback):
        estimator = KerasEstimator(**given, checkpoint_callback=callback)
        callbacks = KerasSettings.of(estimator, False).selecting_callbacks
        return selecting_metric(None, "auto", callbacks)

    assert selecting(BestModelCheckpoint("val_auc", mode="max")) == ("val_auc", "max")
    every = keras.callbacks.ModelCheckpoint("kept.keras", "val_auc")
    assert selecting(every) == ("val_loss", "auto")


def test_a_model_that_was_not_trained_here_has_no_summary():
    model = TorchModel(model=torch.nn.Linear(1, 1))
    assert not model.hasSummary
    with pytest.raises(ResultsError, match=r"^summary: this TorchModel has none.*history_frame"):
        _ = model.summary
