"""The best model of a Keras checkpoint callback, stored in the run's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import BestModelCheckpoint
from hvd_estimators.keras.checkpoint import BestModel
from hvd_estimators.keras.model_file import load_values


def test_the_model_is_stored_as_of_the_end_of_the_epoch(store: Any, tmp_path: Path) -> None:
    folder = store.get_checkpoint_path("mine")
    callback = keras.callbacks.ModelCheckpoint("a.keras")
    kept = BestModel(callback, str(tmp_path), folder, store)
    assert kept.upload() is None
    Path(callback.filepath).write_bytes(b"of the first epoch")
    upload = kept.upload()
    # A thread uploads, while the callback may write the next model.
    assert upload is not None
    Path(callback.filepath).write_bytes(b"of the second epoch")
    upload()
    assert store.read(f"{folder}/kept.keras") == b"of the first epoch"

    (tmp_path / "later").mkdir()
    later = BestModel(callback, str(tmp_path / "later"), folder, store)
    later.fetch()
    assert Path(callback.filepath).read_bytes() == b"of the first epoch"
    # The store has the model already.
    assert later.upload() is None


def test_models_are_compared_after_batches(store: Any, tmp_path: Path) -> None:
    with pytest.raises(ParamError, match=r"save_freq: found 2, and 'val_loss' is measured at the"):
        BestModelCheckpoint(save_freq=2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    callback = BestModelCheckpoint("loss", save_freq=1)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    kept = BestModel(callback, str(tmp_path), None, store)
    found = []
    for batch, loss in enumerate((3.0, 1.0, 2.0)):
        model.set_weights([np.full((1, 1), loss)])
        callback.on_train_batch_end(batch, {"loss": loss})
        path = kept.path()
        assert path is not None
        model.set_weights([np.zeros((1, 1))])
        load_values(model, path)
        found.append(float(model.get_weights()[0][0, 0]))
    assert found == [3.0, 1.0, 1.0]


@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_a_value_that_is_not_measured_selects_no_model(
    store: Any, tmp_path: Path, save_freq: Any
) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    callback = BestModelCheckpoint("each", mode="max", save_freq=save_freq)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    kept = BestModel(callback, str(tmp_path), None, store)
    end = callback.on_epoch_end if save_freq == "epoch" else callback.on_train_batch_end
    end(0, {"loss": 1.0, "each": 0.5})
    assert kept.path() is not None
    for logs in ({"loss": 1.0}, {"loss": 1.0, "each": [0.5, 0.6]}):
        with pytest.raises(ParamError, match=r"monitor='each'.*Set monitor to one of 'loss'\."):
            end(1, logs)
