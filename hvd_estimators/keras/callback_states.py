"""States of callbacks and copies of models, for checkpoints."""

from __future__ import annotations

import importlib
import logging
import pickle
import threading
import types
import zipfile
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import IO, Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import all_layers, inner_optimizers, model_optimizers
from hvd_estimators.keras.model_file import rewritten_variables, write_archive
from hvd_estimators.training.run_state import is_encodable

__all__ = [
    "CallbackStates",
    "ModelCopy",
    "ScalarState",
    "callback_state",
    "restore_callback",
    "save_file",
    "snapshot",
]

logger = logging.getLogger(__name__)


class _Written(threading.local):
    """What a thread writes in place of what layers and optimizers have now, by their ids."""

    values: Mapping[int, Mapping[str, Array]] = {}


_written = _Written()


def snapshot(model: keras.Model) -> ModelCopy | None:
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


_OWN_BYTES = 2**16


"""Above this a value of a callback (the best weights) is taken to be the same on all ranks."""


_NOT_STATE: tuple[str, ...] = ("_model", "params")


_OF_FILES = ("append_header",)


"""What a callback finds out about its file when training begins."""


def save_file(
    model: keras.Model, file: str | IO[bytes], rewritten: Mapping[int, Any] | None = None
) -> None:
    """Write a model as a ``.keras`` file; `load_weights` reads it.

    Of a model without a config it is an archive with ``model.weights.h5``. For ``rewritten`` see
    `write_archive`.
    """
    with zipfile.ZipFile(file, "w") as archive:
        write_archive(model, archive, rewritten)


class ScalarState:
    """The numbers of a model's optimizers: learning rates, counts of steps, loss scales.

    Callbacks that begin set some of them, and do so again where a run goes on.

    Parameters
    ----------
    model : keras.Model
        Its optimizers are built.
    """

    def __init__(self, model: keras.Model) -> None:
        self._values = [
            (variable, variable.numpy())
            for optimizer in model_optimizers(model)
            for variable in optimizer.variables
            if not len(variable.shape)
        ]

    def restore(self) -> None:
        """Set them to what they were when this was made."""
        for variable, value in self._values:
            variable.assign(value)


class CallbackStates:
    """The states of a run's callbacks: those of rank 0, and in what those of other ranks differ.

    A callback that looks at batches sees those of its own rank.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The user's, on all ranks the same.
    restored : mapping
        What `parts` returned when the run was saved; empty where it begins.
    rank, size : int
        This rank, and the number of ranks.
    scalars : ScalarState, optional
        What callbacks set when they begin, of a run that goes on.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        restored: Mapping[str, Any],
        rank: int,
        size: int,
        scalars: ScalarState | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._scalars = scalars
        self._restored = list(restored.get("callbacks", ()))
        of_ranks = restored.get("callbacks_of_ranks", ())
        if len(of_ranks) == size:
            self._restored = [
                {**state, "values": {**state["values"], **own}}
                for state, own in zip(self._restored, of_ranks[rank], strict=True)
            ]

    def own(self) -> list[dict[str, Any]]:
        """Return what rank 0 needs of this rank, by callback."""
        return [
            {
                name: value
                for name, value in callback_state(callback)["values"].items()
                if _num_bytes(value) <= _OWN_BYTES
            }
            for callback in self._callbacks
        ]

    def parts(self, of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the states as a checkpoint keeps them; ``of_ranks`` is what `own` returned."""
        first = of_ranks[0]
        different = [
            [
                {
                    name: value
                    for name, value in values.items()
                    if name not in known or pickle.dumps(value) != pickle.dumps(known[name])
                }
                for values, known in zip(of_rank, first, strict=True)
            ]
            for of_rank in of_ranks
        ]
        states = list(map(callback_state, self._callbacks))
        return {"callbacks": states, "callbacks_of_ranks": different}

    def restore(self) -> None:
        """Give the callbacks of a run that goes on their states back."""
        for callback, state in zip(self._callbacks, self._restored, strict=False):
            restore_callback(callback, state)
        if self._scalars is not None:
            self._scalars.restore()


def callback_state(callback: Any) -> dict[str, dict[str, Any]]:
    """Return the attributes of a callback that are plain values: counters, bests, best weights.

    Functions of Keras's own, by which values are compared, go by their names.
    """
    left_out = _NOT_STATE
    if isinstance(callback, keras.callbacks.CSVLogger):
        left_out = (*left_out, *_OF_FILES)
    attributes = {name: v for name, v in vars(callback).items() if name not in left_out}
    plain = {name: _plain(value) for name, value in attributes.items()}
    functions = {
        name: f"{value.__module__}:{value.__qualname__}"
        for name, value in attributes.items()
        if isinstance(value, types.FunctionType) and _function_of(value) is value
    }
    values = {name: value for name, value in plain.items() if is_encodable(value)}
    return {"values": values, "functions": functions}


def restore_callback(callback: Any, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a callback back what `callback_state` returned, paths of another machine left out."""
    attributes = vars(callback)
    for name, value in state["values"].items():
        if not isinstance(value, str):
            # A container of its own: it can be given back more than once.
            attributes[name] = _like(attributes.get(name), _plain(value))
    for name, function in state["functions"].items():
        attributes[name] = _function(function)


def _num_bytes(value: Any) -> int:
    """Return about how large a plain value is."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


def _plain(value: Any) -> Any:
    """Return a container of any kind as a list, tuple or dict."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(map(_plain, value))
    return value


def _like(given: Any, value: Any) -> Any:
    """Return a value as an object of the kind that a callback has made: a deque, for example."""
    if type(given) is type(value):
        return value
    if isinstance(given, MutableMapping) and isinstance(value, dict):
        given.clear()
        given.update(value)
        return given
    if isinstance(given, MutableSequence) and isinstance(value, list):
        given.clear()
        given.extend(value)
        return given
    if isinstance(given, tuple) and isinstance(value, tuple):
        return type(given)(*value)
    return value


def _function_of(value: types.FunctionType) -> Any:
    if not value.__module__.startswith("keras."):
        return None
    return _function(f"{value.__module__}:{value.__qualname__}")


def _function(name: str) -> Any:
    """Return a function of Keras's; None for one that cannot be found by its name."""
    module, _, path = name.partition(":")
    if not module.startswith("keras."):
        return None
    return getattr(importlib.import_module(module), path, None)
