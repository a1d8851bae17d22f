"""Serialize optimizers as class, config and state. Used on the driver and on workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.custom_objects import complete_config, make_object

__all__ = ["OptimizerPayload"]

_ZEROS_BYTES = 2**10


@dataclass(frozen=True)
class Zeros:
    """Placeholder for an array of zeros, such as an optimizer's slot before the first step."""

    shape: tuple[int, ...]
    dtype: Any


class _State(dict[str, Any]):
    """State that stores large arrays of zeros as `Zeros`, while variables are added one by one."""

    def __setitem__(self, name: str, value: Any) -> None:
        array = np.asarray(value)
        if array.nbytes >= _ZEROS_BYTES and not array.reshape(-1).view(np.uint8).any():
            value = Zeros(array.shape, array.dtype)
        super().__setitem__(name, value)


class _Filled(Mapping[str, Any]):
    """Contents of a `_State`, with arrays instead of `Zeros`."""

    def __init__(self, state: Mapping[str, Array | Zeros]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Array:
        value = self._state[name]
        return np.zeros(value.shape, value.dtype) if isinstance(value, Zeros) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@dataclass(frozen=True)
class OptimizerPayload:
    """A serialized optimizer, from which an optimizer for other variables can be created.

    Attributes
    ----------
    cls : type
        Class of the optimizer.
    config : mapping
        Result of `complete_config`.
    state : mapping
        Values of its variables, by their position.
    custom_objects : mapping
        Classes and other objects that the config names.
    document : bytes or None
        The pickled optimizer, in files of earlier versions, if its config was incomplete.
    """

    cls: type[keras.optimizers.Optimizer]
    config: Mapping[str, Any]
    state: Mapping[str, Array | Zeros]
    custom_objects: Mapping[str, Any]
    document: bytes | None = None

    @staticmethod
    def of(
        optimizer: keras.optimizers.Optimizer, custom_objects: Mapping[str, Any] | None = None
    ) -> OptimizerPayload:
        """Serialize an optimizer.

        Raises
        ------
        UnequalCopyError
            If a copy from the optimizer's config differs from it.
        """
        state = _State()
        optimizer.save_own_variables(state)
        config, found = complete_config(optimizer, custom_objects)
        return OptimizerPayload(type(optimizer), config, state, found)

    def make(self) -> keras.optimizers.Optimizer:
        """Return a new optimizer without state."""
        if self.document is not None:
            return OptimizerPayload.of(loads(self.document)).make()
        optimizer: keras.optimizers.Optimizer = make_object(
            self.cls, self.config, self.custom_objects
        )
        return optimizer

    def restore(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Build an optimizer for a model's variables, and restore its state if there is one."""
        if not optimizer.built:
            optimizer.build(list(variables))
        # The state of an optimizer that was never built has only its iterations and learning rate.
        if len(self.state) == len(optimizer.variables):
            optimizer.load_own_variables(_Filled(self.state))
