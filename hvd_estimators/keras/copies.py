"""A model as it is at one moment, for a thread that writes it while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import IO, Any

import keras
import numpy as np

from hvd_estimators.keras.backend import all_layers, inner_optimizers, model_optimizers
from hvd_estimators.keras.checkpoint import save_file
from hvd_estimators.keras.rewritten import rewritten_variables
from hvd_estimators.parquet.columns import Array

__all__ = ["ModelCopy", "copied"]

logger = logging.getLogger(__name__)


class _Written(threading.local):
    """What a thread writes in place of what layers and optimizers have now, by their ids."""

    values: Mapping[int, Mapping[str, Array]] = {}


_written = _Written()


def copied(model: keras.Model) -> ModelCopy | None:
    """Return a copy of what a model's file holds; None where that cannot be had.

    It cannot where a layer saves files of its own, or can write to Keras's own kind of store alone.
    """
    for layer in all_layers(model):
        save_assets = getattr(layer, "save_assets", None)
        if save_assets is not None and save_assets.__module__.partition(".")[0] != "keras":
            return None
    try:
        return ModelCopy(model)
    except Exception as error:
        logger.debug("A checkpoint is written while training waits: %s", error)
        return None


class ModelCopy:
    """What the layers and optimizers of a model save, in the machine's memory.

    No second model is made of it, since not each can be cloned. The model itself is written, whose
    layers then save the copy instead of what they have by now, in the thread that writes.

    Parameters
    ----------
    model : keras.Model
        Built and compiled.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._values: dict[int, _Store] = {}
        self._rewritten = rewritten_variables(model)
        optimizers = model_optimizers(model)
        inner = [each for optimizer in optimizers for each in inner_optimizers(optimizer)]
        for saver in [*all_layers(model), *optimizers, *inner]:
            if id(saver) not in self._values:
                store = _Store()
                saver.save_own_variables(store)
                self._values[id(saver)] = store
                _let_save_copies(saver)

    def save(self, file: IO[bytes]) -> None:
        """Write what `save_file` would have written at that moment. From any thread."""
        _written.values = self._values
        try:
            save_file(self._model, file, self._rewritten)
        finally:
            _written.values = {}


class _Store(dict[str, Array]):
    """Takes what a layer saves, as one of Keras's stores does, and keeps a copy of it."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, np.array(keras.ops.convert_to_numpy(value)))


def _let_save_copies(saver: Any) -> None:
    """Make a layer or an optimizer save its copy in a thread that writes one."""
    # Past Keras, which would look into what it is given.
    attributes = vars(saver)
    if "save_own_variables" in attributes:
        return
    save = saver.save_own_variables

    def save_own_variables(store: Any) -> None:
        values = _written.values.get(id(saver))
        if values is None:
            save(store)
        else:
            for name, value in values.items():
                store[name] = value

    attributes["save_own_variables"] = save_own_variables
