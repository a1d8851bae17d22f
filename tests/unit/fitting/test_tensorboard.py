"""TensorBoard shows each epoch of a run once, despite interruptions."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_estimators import Store
from hvd_estimators.fitting.tensorboard import TensorBoardLogger
from hvd_estimators.loggers import LoggedRun


@pytest.mark.parametrize("is_remote", [False, True])
def test_repeated_epochs_replace_those_of_an_interrupted_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    store = Store.create(str(tmp_path))
    if is_remote:  # The files are uploaded.
        monkeypatch.setattr(store, "writable_path", lambda path: None)
    for first, values in ((0, [1.0, 2.0, 3.0]), (1, [2.5, 3.5]), (3, [4.0]), (4, [])):
        logger = TensorBoardLogger(store, f"{tmp_path}/logs")
        logger.start(LoggedRun("first", "0" * 40, first, {"batch_size": 8}))
        for epoch, value in enumerate(values, start=first):
            logger.log_metrics({"loss": value, "val_loss": -value, "learning_rate": 0.5}, epoch)
        logger.finish("finished")
    shown = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert sorted(shown.Tags()["scalars"]) == ["learning_rate", "train/loss", "validation/loss"]
    expected = [(0, 1.0), (1, 2.5), (2, 3.5), (3, 4.0)]
    for tag, sign in (("train/loss", 1), ("validation/loss", -1)):
        assert [(event.step, sign * event.value) for event in shown.Scalars(tag)] == expected


def test_losses_are_left_to_a_callback_of_the_user(tmp_path: Path) -> None:
    logger = TensorBoardLogger(Store.create(str(tmp_path)), f"{tmp_path}/logs", only_rates=True)
    logger.start(LoggedRun("first", "0" * 40, 0, {}))
    logger.log_metrics({"loss": 1.0, "learning_rate_0": 0.5, "rows_per_second": 9.0}, 0)
    logger.finish("failed")
    tags = EventAccumulator(str(tmp_path / "logs")).Reload().Tags()["scalars"]
    assert sorted(tags) == ["learning_rate_0", "rows_per_second"]
