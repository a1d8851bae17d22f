"""Serialize models, optimizers, losses and metrics, with custom classes and functions.

A model travels as a recipe and as the values of its variables. Before it is sent, a copy is
compared with it. Loading runs code from the bytes. Used on the driver and on workers.
"""

from __future__ import annotations

import copyreg
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

import cloudpickle
import keras

from hvd_estimators._util.random_state import kept_random_state
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import load as load_from
from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import (
    all_layers,
    has_own_compile,
    is_keras,
    model_optimizers,
)
from hvd_estimators.keras.custom_objects import Recipe, UnequalCopyError, is_remembered
from hvd_estimators.keras.model_file import ModelValues

_LARGE_BYTES = 2**26
"""Size of models that are written to a file instead of into memory."""


def dump(value: Any, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Serialize a value that may contain models, optimizers, losses and metrics.

    Parameters
    ----------
    value : object
        Any value that cloudpickle supports, including Keras objects.
    custom_objects : mapping, optional
        Name to class or function, in addition to those found in the value.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, dict(custom_objects or {})).dump(value)
    return buffer.getvalue()


def load(document: bytes) -> Any:
    """Load a value that `dump` serialized. Models are compiled as before."""
    return loads(document)


def model_payload(
    model: keras.Model, custom_objects: Mapping[str, Any] | None = None
) -> bytes | LocalFile:
    """Serialize a model without its compile arguments, a large one to a file."""
    document, _ = _documented(model, custom_objects, compiled=False)
    if sum(array.nbytes for array in document.values.arrays) < _LARGE_BYTES:
        return dump(document, custom_objects)
    local = LocalFile()
    with open(local.path, "wb") as file:
        _Pickler(file, dict(custom_objects or {})).dump(document)
    return local


def load_model(document: bytes | os.PathLike[str]) -> keras.Model:
    """Load a model from `model_payload`, compiled only if the user's function does it."""
    with io.BytesIO(document) if isinstance(document, bytes) else open(document, "rb") as file:
        loaded: ModelDocument = load_from(file)
    return loaded.make()


def copy_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """Return a copy of a model, as `model_payload` and `load_model` make it."""
    document, copy = _documented(model, custom_objects, compiled=False)
    document.values.assign(copy)
    return copy


@dataclass(frozen=True)
class ModelDocument:
    """Content from which a model is rebuilt.

    Attributes
    ----------
    recipe : Recipe
        Its config, or the function that makes it.
    policy : object
        Dtype policy, serialized. Layers that a model's constructor makes get the global policy.
    builds : list of (bool, mapping)
        Whether each layer is built, and Keras's build config.
    values : ModelValues
        Values of the variables.
    compiled : mapping or None
        Compile arguments; the optimizer is a `Recipe`.
    """

    recipe: Recipe
    policy: Any
    builds: list[tuple[bool, Any]]
    values: ModelValues
    compiled: Mapping[str, Any] | None

    def make(self) -> keras.Model:
        """Return the model, compiled if there are compile arguments."""
        with kept_random_state():
            model = self.build()
            if self.compiled is not None:
                optimizer = self.compiled["optimizer"].make()
                # Keras has scaled its loss already, if the user wanted it.
                model.compile(**{**self.compiled, "optimizer": optimizer, "auto_scale_loss": False})
            self.values.assign(model)
            optimizer = model.optimizer if model.compiled else None
            if optimizer is not None and model.trainable_variables and not optimizer.built:
                optimizer.build(model.trainable_variables)
        return model

    def build(self) -> keras.Model:
        """Return the model with new values, compiled only if the user's function does it."""
        given = keras.config.dtype_policy()
        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(self.policy))
        try:
            model: keras.Model = self.recipe.make()
            layers = all_layers(model)
            for number, (is_built, config) in enumerate(self.builds):
                if number < len(layers) and is_built and not layers[number].built:
                    # Keras records no shapes for a model without call().
                    if any(size is not None for size in keras.tree.flatten(config)):
                        layers[number].build_from_config(config)
                    layers[number].built = True
                    layers = all_layers(model)
        finally:
            keras.config.set_dtype_policy(given)
        return model


def _documented(
    model: keras.Model, custom_objects: Mapping[str, Any] | None, compiled: bool
) -> tuple[ModelDocument, keras.Model]:
    """Return a model's document, and a copy whose values and compile arguments are left out.

    Raises
    ------
    Exception
        If Keras cannot rebuild the model, or the copy differs from it.
    """
    arguments = compile_arguments(model) if compiled else None
    if has_own_compile(model) and not is_remembered(model):
        raise UnequalCopyError(
            f"{type(model).__name__} has its own compile(), whose arguments Keras does not know; "
            "set model to a function that makes and compiles it"
        )
    optimizers: list[Any] = [
        # A copy has the same zeros before the first step.
        each if each.built and int(each.iterations) else None
        for each in model_optimizers(model)
        if arguments is not None or has_own_compile(model) or each is not model.optimizer
    ]
    if arguments is not None:
        arguments["optimizer"] = Recipe.of(model.optimizer, custom_objects)
    document = ModelDocument(
        Recipe.of(model, custom_objects),
        keras.dtype_policies.serialize(model.dtype_policy),
        [(layer.built, layer.get_build_config()) for layer in all_layers(model)],
        ModelValues.of(model, optimizers),
        arguments,
    )
    sent: ModelDocument = load(
        dump(replace(document, values=None, compiled=None), custom_objects)  # type: ignore[arg-type]
    )
    with kept_random_state():
        copy = sent.build()
    if copy is model:
        raise UnequalCopyError("the function returns the same model each time; let it make one")
    document.values.check(copy)
    return document, copy


class ModelPayload:
    """A compiled model that is sent to the ranks.

    The values are not copied into memory: they are pickled one by one, from the model's variables.

    Parameters
    ----------
    model : keras.Model
        Built, compiled, and not used by other code.
    custom_objects : mapping, optional
        As for `dump`.
    """

    def __init__(self, model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> None:
        self._model: Any = model
        self._custom_objects = custom_objects
        self._arrays: list[Array] | None = None

    def load(self) -> keras.Model:
        """Return the compiled model: the given one, or a copy of it in another process.

        This method can be called only once.
        """
        given, self._model = self._model, None
        if self._arrays is not None:
            document: ModelDocument = load(given)
            values = replace(document.values, arrays=_freed(self._arrays))
            return replace(document, values=values).make()
        return given

    def __reduce__(self) -> Any:
        assert self._model is not None, "The model has been taken."
        document, _ = _documented(self._model, self._custom_objects, compiled=True)
        head = replace(document, values=replace(document.values, arrays=()))
        return _received, (dump(head, self._custom_objects), list(document.values.arrays))


def _received(document: bytes, arrays: list[Array]) -> ModelPayload:
    payload = ModelPayload(document)
    payload._arrays = arrays
    return payload


def _freed(arrays: list[Array]) -> Iterator[Array]:
    arrays.reverse()
    while arrays:
        yield arrays.pop()


class _Pickler(cloudpickle.Pickler):
    """Pickler that stores models, optimizers and metrics by config, and losses by attributes."""

    def __init__(self, file: IO[bytes], custom_objects: dict[str, Any]) -> None:
        super().__init__(file)
        self._custom_objects = custom_objects

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return ModelDocument.make, (_documented(obj, self._custom_objects, compiled=True)[0],)
        if isinstance(obj, (keras.optimizers.Optimizer, keras.metrics.Metric)):
            return Recipe.make, (Recipe.of(obj, self._custom_objects),)
        if isinstance(obj, keras.losses.Loss):
            # Keras would pickle a config, from which a custom class may lack arguments.
            return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]
        if is_keras(type(obj)) and isinstance(obj, (list, dict, set)):
            # What a layer tracks may be part of its config.
            kind = next(kind for kind in (list, dict, set) if isinstance(obj, kind))
            return kind, (kind(obj),)
        return super().reducer_override(obj)


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """Return a model's compile arguments without the optimizer.

    None if it is not compiled, or by its own ``compile``.
    """
    is_usual = model.compiled and isinstance(model.optimizer, keras.optimizers.Optimizer)
    if not is_usual or has_own_compile(model):
        return None
    compiled = dict(model._compile_config.config)
    # compile() may have wrapped the optimizer for mixed precision.
    compiled.pop("optimizer", None)
    return compiled
