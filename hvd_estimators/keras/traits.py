"""What the config of a model does not give to its copies. Used on both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from hvd_estimators.keras.backend import all_layers

__all__ = ["Traits"]


@dataclass(frozen=True)
class Traits:
    """Paths of variables and types of layers.

    Attributes
    ----------
    paths : list of str
        Paths of the variables. Keras makes other ones, and a MultiOptimizer chooses by them.
    policies : list of mapping
        Types of the layers. Those that a model makes in its constructor have the policy that was
        set globally then (``mixed_float16``), in whatever process.
    """

    paths: list[str]
    policies: list[Any]

    @staticmethod
    def of(model: keras.Model) -> Traits:
        """Note those of a model."""
        return Traits(
            [variable.path for variable in model.variables],
            [keras.dtype_policies.serialize(part.dtype_policy) for part in all_layers(model)],
        )

    @contextlib.contextmanager
    def policy(self) -> Iterator[None]:
        """Make new layers get the model's own policy."""
        given = keras.config.dtype_policy()
        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(self.policies[0]))
        try:
            yield
        finally:
            keras.config.set_dtype_policy(given)

    def give(self, model: keras.Model) -> None:
        """Set them on a copy."""
        layers, variables = all_layers(model), model.variables
        if len(layers) == len(self.policies):
            for layer, policy in zip(layers, self.policies, strict=True):
                if keras.dtype_policies.serialize(layer.dtype_policy) != policy:
                    layer.dtype_policy = keras.dtype_policies.deserialize(policy)
        if len(variables) == len(self.paths):
            for variable, path in zip(variables, self.paths, strict=True):
                variable._path = path
