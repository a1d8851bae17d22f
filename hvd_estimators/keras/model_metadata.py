"""Model properties that a copy from the config lacks. Used on the driver and on workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import (
    all_layers,
    build_optimizers,
    further_optimizers,
    optimizer_positions,
)
from hvd_estimators.keras.custom_objects import (
    UnequalCopyError,
    data_attributes,
    missing_attributes,
    set_attributes,
)
from hvd_estimators.keras.model_file import own_variables, variable_value


@dataclass(frozen=True)
class ModelMetadata:
    """Paths and values of variables, types and attributes of layers.

    Attributes
    ----------
    paths : list of str
        Paths of the variables. Keras creates other paths in copies, and a MultiOptimizer selects
        variables by path.
    policies : list of mapping
        Dtype policies of the layers. Layers created in a model's constructor get the global policy
        of their process, such as ``mixed_float16``.
    trainable : list of bool
        Whether each variable is trainable.
    values : mapping
        Values, by position, of the variables that Keras's files change. A ``.keras`` file stores a
        layer's kernel with the product of its LoRA adapters added, and omits the adapters.
    attributes : mapping
        Data attributes of custom layers, by position.
    layers : list of bool
        Whether each layer is trainable. Keras's config of a `keras.Sequential` does not contain it.
    optimizers : sequence
        For each optimizer in the model's attributes: the positions of the variables that it
        trains, and the values of its state. Both are empty if the optimizer is not built.
    """

    paths: list[str]
    policies: list[Any]
    trainable: list[bool]
    values: Mapping[int, Array]
    attributes: Mapping[int, Mapping[str, Any]]
    layers: list[bool]
    optimizers: Sequence[tuple[list[int], list[Array]]] = ()

    @staticmethod
    def of(model: keras.Model) -> ModelMetadata:
        """Return the metadata of a model, without values."""
        layers = all_layers(model)
        attributes = {number: data_attributes(layer) for number, layer in enumerate(layers)}
        return ModelMetadata(
            [variable.path for variable in model.variables],
            [keras.dtype_policies.serialize(part.dtype_policy) for part in layers],
            [variable.trainable for variable in model.variables],
            {},
            {number: values for number, values in attributes.items() if values},
            [layer.trainable for layer in layers],
        )

    def paired(self, model: keras.Model, copy: keras.Model) -> tuple[ModelMetadata, list[Any]]:
        """Return this metadata in the order of a copy, and the variables (model's, copy's).

        The copy's layers and variables are as trainable as the model's, and the variables get the
        paths of the model's.

        Raises
        ------
        UnequalCopyError
            If the copy has other layers, variables or attributes.
        """
        _check_layers(model, copy)
        pairs = _pairs(model, copy)
        _set_trainable(copy, self.layers)
        for ours, theirs in pairs:
            theirs.trainable = ours.trainable
            theirs._path = ours.path
        paths, trainable = [o.path for o, _ in pairs], [o.trainable for o, _ in pairs]
        return replace(self, paths=paths, trainable=trainable), pairs

    def completed(self, model: keras.Model, copy: keras.Model) -> ModelMetadata:
        """Return this metadata with the values that a copy lacks, and assign them to the copy.

        These include the states of the optimizers in attributes.

        Raises
        ------
        UnequalCopyError
            If the copy has other layers, variables or attributes.
        """
        metadata, pairs = self.paired(model, copy)
        values = {}
        for number, (ours, theirs) in enumerate(pairs):
            value = variable_value(ours)
            if not _same_bits(value, variable_value(theirs)):
                values[number] = np.array(value)
                theirs.assign(value)
        positions = optimizer_positions(model, [ours for ours, _ in pairs])
        states = [
            [variable.numpy() for variable in optimizer.variables] if of_optimizer else []
            for optimizer, of_optimizer in zip(further_optimizers(model), positions, strict=True)
        ]
        optimizers = list(zip(positions, states, strict=True))
        metadata = replace(metadata, values=values, optimizers=optimizers)
        metadata._restore_optimizers(copy)
        return metadata

    @contextlib.contextmanager
    def policy(self) -> Iterator[None]:
        """Make new layers use the model's own policy until the block ends."""
        given = keras.config.dtype_policy()
        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(self.policies[0]))
        try:
            yield
        finally:
            keras.config.set_dtype_policy(given)

    def apply(self, model: keras.Model) -> None:
        """Set these properties on a copy."""
        layers, variables = all_layers(model), model.variables
        if len(layers) == len(self.policies):
            for number, (layer, policy) in enumerate(zip(layers, self.policies, strict=True)):
                if keras.dtype_policies.serialize(layer.dtype_policy) != policy:
                    layer.dtype_policy = keras.dtype_policies.deserialize(policy)
                set_attributes(layer, self.attributes.get(number, {}))
        _set_trainable(model, self.layers)
        if len(variables) == len(self.paths):
            for variable, path in zip(variables, self.paths, strict=True):
                variable._path = path
        if len(variables) == len(self.trainable):
            for variable, trainable in zip(variables, self.trainable, strict=True):
                variable.trainable = trainable
        for number, value in self.values.items():
            variables[number].assign(value)
        self._restore_optimizers(model)

    def _restore_optimizers(self, model: keras.Model) -> None:
        build_optimizers(model, [positions for positions, _ in self.optimizers])
        pairs = zip(further_optimizers(model), self.optimizers, strict=False)
        for optimizer, (positions, values) in pairs:
            if positions:
                for variable, value in zip(optimizer.variables, values, strict=True):
                    variable.assign(value)


def _set_trainable(model: keras.Model, trainable: Sequence[bool]) -> None:
    """Set whether each layer is trainable, without effect on the layers below and on variables."""
    layers = all_layers(model)
    if len(layers) == len(trainable):
        for layer, value in zip(layers, trainable, strict=True):
            layer._trainable = value


def _check_layers(model: keras.Model, copy: keras.Model) -> None:
    ours, theirs = all_layers(model), all_layers(copy)
    names = [[type(layer).__qualname__ for layer in layers] for layers in (ours, theirs)]
    if names[0] != names[1]:
        raise UnequalCopyError(
            f"it has the layers {', '.join(names[0])}; a copy, {', '.join(names[1])}"
        )
    for a, b in zip(ours, theirs, strict=True):
        missing = missing_attributes(a, b)
        if missing:
            raise UnequalCopyError(
                f"a copy of {type(a).__name__} lacks the attribute {missing[0]!r} of type "
                f"{type(getattr(a, missing[0])).__name__}, which cannot be pickled"
            )


def _pairs(model: keras.Model, copy: keras.Model) -> list[tuple[Any, Any]]:
    """Pair a model's variables with a copy's, in the order of the copy.

    The order differs if variables were added after a layer was built.
    """
    if len(model.variables) != len(copy.variables):
        raise UnequalCopyError(
            f"it has {len(model.variables)} variables, and a copy has {len(copy.variables)}"
        )
    matched: dict[int, Any] = {
        id(b): a for a, b in zip(model.variables, copy.variables, strict=True)
    }
    for a, b in zip(all_layers(model), all_layers(copy), strict=True):
        ours, theirs = ({v.name: v for v in own_variables(layer)} for layer in (a, b))
        if ours.keys() == theirs.keys():
            matched.update({id(theirs[name]): ours[name] for name in ours})
    pairs = [(matched[id(b)], b) for b in copy.variables]
    ids = {id(variable) for variable in model.variables}
    for a, b in pairs:
        forms = [f"shape {tuple(v.shape)} and type {v.dtype}" for v in (a, b)]
        if forms[0] != forms[1]:
            raise UnequalCopyError(f"its variable {a.path!r} has {forms[0]}; in a copy, {forms[1]}")
        if id(b) in ids:
            raise UnequalCopyError(f"its copies share the variable {a.path!r} with it")
    trainable = [id(a) for a, _ in pairs if a.trainable]
    optimizer = getattr(model, "optimizer", None)
    if trainable != [id(v) for v in model.trainable_variables] and _has_stepped(optimizer):
        raise UnequalCopyError(
            "its optimizer has slots for variables in another order than its copies"
        )
    return pairs


def _has_stepped(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.Optimizer) and int(optimizer.iterations) > 0


def _same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays are equal bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    ours, theirs = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return bool(np.array_equal(ours, theirs))
