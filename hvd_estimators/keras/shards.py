"""What a shard has for itself in Keras, where a rank plays several. Runs on the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.randomness import RandomStreams, seed_states
from hvd_estimators.training.shards import ShardStates

__all__ = ["Turns", "VariableState"]


class VariableState:
    """Variables that layers change while they train: statistics of batch normalization and so on.

    Those of frozen layers do not change, and can be large: they are left out.

    Parameters
    ----------
    model : keras.Model
        Built.
    """

    def __init__(self, model: keras.Model) -> None:
        seeds = {id(state) for state in seed_states(model)}
        frozen = {
            id(variable)
            for layer in all_layers(model)
            if not layer.trainable
            for variable in layer.variables
        }
        self._variables = [
            variable
            for variable in model.non_trainable_variables
            if id(variable) not in seeds | frozen
        ]

    def capture(self) -> list[Any]:
        """Return the values."""
        return [variable.numpy() for variable in self._variables]

    def restore(self, state: Sequence[Any]) -> None:
        """Set the values that `capture` returned."""
        for variable, value in zip(self._variables, state, strict=True):
            variable.assign(value)


class Turns:
    """Counts the batches of a rank as steps, and makes the rank the shard whose turn it is.

    Parameters
    ----------
    model : keras.Model
        The model.
    num_shards : int
        Number of canonical shards.
    rank, size : int
        This rank, and the number of ranks.
    streams : RandomStreams
        The rank's random streams.
    steps_per_call : int
        Steps between two calls of the callbacks.

    Attributes
    ----------
    variables : VariableState
        What layers change.
    shards : ShardStates
        What the rank's shards have for themselves.
    passes : int
        Batches of a step.
    """

    def __init__(
        self,
        model: keras.Model,
        num_shards: int,
        rank: int,
        size: int,
        streams: RandomStreams,
        steps_per_call: int = 1,
    ) -> None:
        self.variables = VariableState(model)
        self.shards = ShardStates(num_shards, rank, size, (streams, self.variables))
        self.passes = self.shards.passes
        self._model = model
        self._steps_per_call = steps_per_call
        self._measured: list[Any] | None = None

    def begin(self, batch: int) -> int | None:
        """Be the shard of a batch; return the step if that is one which callbacks are told of."""
        step, turn = divmod(batch, self.passes)
        if self.passes > 1:
            self.shards.enter(turn)
            if turn >= len(self.shards.shards):
                # A loss over no rows is NaN.
                self._measured = [variable.numpy() for variable in self._model.metrics_variables]
        return step if not turn and not step % self._steps_per_call else None

    def end(self, batch: int) -> int | None:
        """Note that a batch is over; return the step, counted from 0, if that is over, too."""
        if self.passes == 1:
            return batch
        if self._measured is not None:
            for variable, value in zip(self._model.metrics_variables, self._measured, strict=True):
                variable.assign(value)
            self._measured = None
        step, turn = divmod(batch, self.passes)
        if turn + 1 < self.passes:
            return None
        self.shards.enter(0)
        return step

    def is_told(self, step: int) -> bool:
        """Return whether callbacks are told of the end of a step."""
        return not (step + 1) % self._steps_per_call
