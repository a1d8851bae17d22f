"""Optimizers as plain values: class, config and state. Used on both sides."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvd_estimators._util.unpickling import loads
from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.custom_objects import find_custom_objects
from hvd_estimators.keras.states import dump_state, same_optimizer, without_variables

__all__ = ["OptimizerPayload"]

_ZEROS_BYTES = 2**10


@dataclass(frozen=True)
class Zeros:
    """An array of zeros, which an optimizer's slots are before its first step."""

    shape: tuple[int, ...]
    dtype: Any


class _State(dict[str, Any]):
    """Takes variables, one at a time, and notes only that they are zero where they are."""

    def __setitem__(self, name: str, value: Any) -> None:
        array = np.asarray(value)
        if array.nbytes >= _ZEROS_BYTES and not array.reshape(-1).view(np.uint8).any():
            value = Zeros(array.shape, array.dtype)
        super().__setitem__(name, value)


class _Filled(Mapping[str, Any]):
    """What `_State` was given."""

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
    """An optimizer as plain values, of which another one is made for other variables.

    Attributes
    ----------
    cls : type
        Its class.
    config : mapping
        What ``get_config()`` returned.
    state : mapping
        Its variables, by their position.
    custom_objects : mapping
        Classes that the config names.
    document : bytes or None
        The optimizer as it is, where its config does not tell all.
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
        """Take an optimizer down."""
        state = _State()
        optimizer.save_own_variables(state)
        try:
            found = find_custom_objects([optimizer], custom_objects)
            document = OptimizerPayload(type(optimizer), optimizer.get_config(), state, found)
            if same_optimizer(optimizer, document.make()):
                return document
        except (NotImplementedError, TypeError, ValueError):
            pass
        return OptimizerPayload(type(optimizer), {}, state, {}, dump_state(optimizer))

    def make(self) -> keras.optimizers.Optimizer:
        """Return such an optimizer, without its state."""
        if self.document is not None:
            return without_variables(loads(self.document))
        with keras.saving.custom_object_scope(dict(self.custom_objects)):
            # Classes take out of the config what they have used.
            return self.cls.from_config(copy.deepcopy(dict(self.config)))

    def restore(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Build an optimizer for a model's variables and give it the state, where there is one."""
        if not optimizer.built:
            optimizer.build(list(variables))
        # One that was never built has no more than its iterations and its learning rate.
        if len(self.state) == len(optimizer.variables):
            optimizer.load_own_variables(_Filled(self.state))
