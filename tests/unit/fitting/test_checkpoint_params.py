"""Checkpoint params of estimators; wrong values fail before the ranks start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_runs import ESTIMATORS, NoRanks, Started, write

from hvd_estimators.exceptions import ParamError
from hvd_estimators.training.spec import mode_of

ALL = list(ESTIMATORS)


def start(store: Any, framework: str, monkeypatch: pytest.MonkeyPatch, **params: Any) -> Any:
    """Fit up to the start of the ranks, and return their checkpoint options."""
    told = []
    cls, given = ESTIMATORS[framework]
    make = cls.framework_class.make_spec

    def make_spec(self: Any, common: Any, trial: Any) -> Any:
        told.append(common.checkpoints)
        return make(self, common, trial)

    monkeypatch.setattr(cls.framework_class, "make_spec", make_spec)
    write(store)
    estimator = cls(
        **{
            "backend": NoRanks(),
            "store": store,
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "verbose": 0,
            **given,
            **params,
        }
    )
    with pytest.raises(Started):
        estimator.fit_on_parquet()
    return told[-1]


@pytest.mark.parametrize("framework", ALL)
def test_ranks_get_the_checkpoint_options(
    store: Any, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = start(store, framework, monkeypatch)
    assert (usual.framework, usual.keep, usual.monitor, usual.mode) == (framework, 2, None, "auto")
    assert usual.every_n_steps is None
    other = start(
        store,
        framework,
        monkeypatch,
        keep_checkpoints=5,
        checkpoint_monitor="loss",
        checkpoint_mode="max",
        checkpoint_every_n_steps=100,
    )
    assert (other.keep, other.monitor, other.mode) == (5, "loss", "max")
    assert other.every_n_steps == 100


def test_torch_validates_the_monitored_metric_before_training(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"metrics": [torch.nn.L1Loss()], "checkpoint_mode": "min"}
    with pytest.raises(ParamError, match=r"'group_0_x', which is not measured.*'L1Loss', 'loss'"):
        start(store, "torch", monkeypatch, checkpoint_monitor="group_0_x", **params)
    told = start(store, "torch", monkeypatch, checkpoint_monitor="L1Loss", **params)
    assert told.monitor == "L1Loss"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "min") for name in ("loss", "val_loss", "train_loss", "mae", "val_mean_error")),
        *((name, "max") for name in ("val_acc", "accuracy", "binary_accuracy", "val/AUC", "f1")),
        # torchmetrics classes.
        *((name, "max") for name in ("val_MulticlassAUROC", "BinaryF1Score", "R2Score")),
        *((name, "min") for name in ("MeanSquaredError", "L1Loss", "y_MeanAbsoluteError")),
    ],
)
def test_the_mode_follows_from_the_metrics_name(name: str, expected: str) -> None:
    assert mode_of(name, "auto") == expected
    assert mode_of(name, "min") == "min"


@pytest.mark.parametrize("name", ["odd", "accuracy_loss", "val_"])
def test_ambiguous_metric_names_need_a_mode(name: str) -> None:
    with pytest.raises(ParamError, match="checkpoint_mode"):
        mode_of(name, "auto")
    assert mode_of(name, "max") == "max"
