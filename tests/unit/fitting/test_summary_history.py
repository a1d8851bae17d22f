"""Histories of three frameworks, converted to rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_estimators.keras import KerasModel
from hvd_estimators.lightning import LightningModel
from hvd_estimators.summary import as_keras_history, history_rows
from hvd_estimators.torch import TorchModel
from hvd_estimators.training.spec import EpochMetrics

KERAS = {
    "loss": [0.5, 0.25],
    "accuracy": [0.75, 1.0],
    "val_loss": [0.625, 0.375],
    "learning_rate": [0.5, 0.125],
}
TORCH = [
    {
        "epoch": 0,
        "train": {"loss": 0.5, "all_metrics": [{"group_0_a": 1.0, "group_0_b": 2.0}]},
        "validation": {"loss": 0.625, "all_metrics": [{"group_0_a": 3.0, "group_0_b": 4.0}]},
    },
    {"epoch": 1, "train": {"loss": 0.25, "all_metrics": []}},
]
LIGHTNING = [
    {"epoch": 0, "train": {"loss": 0.5, "train_acc": 0.75}, "validation": {"val_loss": 0.625}},
    {"epoch": 1, "train": {"loss": 0.25}, "validation": {}},
]


def rows_of(model: Any) -> list[tuple[Any, ...]]:
    frame = model.history_frame()
    assert list(frame.columns) == ["epoch", "stage", "name", "value"]
    assert (frame["epoch"].dtype, frame["value"].dtype) == (np.int64, np.float64)
    return list(frame.itertuples(index=False, name=None))


def test_keras_histories_hold_lists_by_name() -> None:
    assert rows_of(KerasModel(history=KERAS)) == [
        (0, "train", "loss", 0.5),
        (0, "train", "accuracy", 0.75),
        (0, "train", "learning_rate", 0.5),
        (0, "validation", "loss", 0.625),
        (1, "train", "loss", 0.25),
        (1, "train", "accuracy", 1.0),
        (1, "train", "learning_rate", 0.125),
        (1, "validation", "loss", 0.375),
    ]


def test_torch_histories_hold_a_dict_per_epoch_with_groups_of_metrics() -> None:
    assert rows_of(TorchModel(history=TORCH)) == [
        (0, "train", "loss", 0.5),
        (0, "train", "group_0_a", 1.0),
        (0, "train", "group_0_b", 2.0),
        (0, "validation", "loss", 0.625),
        (0, "validation", "group_0_a", 3.0),
        (0, "validation", "group_0_b", 4.0),
        (1, "train", "loss", 0.25),
    ]


def test_lightning_histories_hold_a_dict_of_logged_values_per_epoch() -> None:
    assert rows_of(LightningModel(history=LIGHTNING)) == [
        (0, "train", "loss", 0.5),
        (0, "train", "train_acc", 0.75),
        (0, "validation", "val_loss", 0.625),
        (1, "train", "loss", 0.25),
    ]


def test_arrays_become_several_numbers_and_other_values_are_skipped() -> None:
    """Keras's F1Score has one value per class; a callback may log anything."""
    history = {"f1": [np.array([0.5, 0.25])], "note": ["late"], "rate": [np.float32(0.5)]}

    assert history_rows(history) == [
        (0, "train", "f1_0", 0.5),
        (0, "train", "f1_1", 0.25),
        (0, "train", "rate", 0.5),
    ]


def test_both_forms_of_a_history_have_the_same_rows() -> None:
    epochs = [
        EpochMetrics(0, {"loss": 0.5, "mae": 2.0}, {"loss": 1.5}),
        EpochMetrics(1, {"loss": 0.25, "mae": 1.0}, {"loss": 0.75}),
    ]

    assert history_rows(as_keras_history(epochs)) == history_rows([e.as_dict() for e in epochs])
    assert as_keras_history(epochs) == {
        "loss": [0.5, 0.25],
        "mae": [2.0, 1.0],
        "val_loss": [1.5, 0.75],
    }
