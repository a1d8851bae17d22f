"""A rank's own random numbers while it trains: dropout, noise, augmentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# There is no public way to the generator that keras.random uses when no seed is given.
from keras.src.random.seed_generator import global_seed_generator

from hvd_estimators.keras.backend import all_layers
from hvd_estimators.training.randomness import HostStreams
from hvd_estimators.training.rank import rank_seed, seed_rank

__all__ = ["RandomStreams", "seed_states", "split_seed_states"]


class RandomStreams(HostStreams):
    """Gives a shard its own random numbers in each epoch, whatever draws them.

    These are the generators of layers, those that `keras.random` and ``tf.random`` have for all,
    and Python's and NumPy's. What is drawn in an epoch depends on the run's seed, the shard and the
    epoch alone, so that a resumed run goes on as if it had not been interrupted. (All but
    ``tf.random.uniform`` and the like, whose state TensorFlow lets nobody set: a resumed run draws
    other numbers there.)

    Parameters
    ----------
    model : keras.Model
        Its generators have the same states on all ranks, and in each part of the run.
    seed : int
        Seed of the run.
    shard : int
        The shard that the rank plays, or the first one of those.
    first_epoch : int
        The epoch with which this part of the run begins.
    rows : int
        Rows of that epoch that are done.
    """

    def __init__(
        self, model: keras.Model, seed: int, shard: int, first_epoch: int = 0, rows: int = 0
    ) -> None:
        self._seed = seed
        # Generators of the same seed draw the same numbers, as they do in one process.
        self._states = [(state, state.numpy().tolist()) for state in seed_states(model)]
        self._states.append((global_seed_generator().state, [0, 0]))
        own = seed_rank(seed, shard, first_epoch)
        if rows:
            own = _mixed(own, [rows])[0]
        # Counts for functions that are traced later. In a later epoch it would begin their numbers
        # anew, the same ones.
        tf.random.set_seed(own)
        tf.random.set_global_generator(tf.random.Generator.from_seed(own))
        self._generators = [*_tensorflow_generators(model), tf.random.get_global_generator()]

    def begin(self, shard: int, epoch: int) -> None:
        """Begin a shard's streams of an epoch."""
        own = seed_rank(self._seed, shard, epoch)
        for state, given in self._states:
            state.assign(_mixed(own, given))
        for number, generator in enumerate(self._generators):
            generator.reset_from_seed(_mixed(own, [number])[0])

    def capture(self) -> dict[str, Any]:
        """Return the states, as plain values that a checkpoint keeps."""
        return {
            **super().capture(),
            "keras": [state.numpy() for state, _ in self._states],
            "tensorflow": [generator.state.numpy() for generator in self._generators],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the states that `capture` returned."""
        super().restore(state)
        for (variable, _), value in zip(self._states, state["keras"], strict=True):
            variable.assign(value)
        for generator, value in zip(self._generators, state["tensorflow"], strict=True):
            generator.state.assign(value)


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of a model's `keras.random.SeedGenerator`: integers that are no weights."""
    weights = {id(weight) for weight in model.weights}
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) not in weights
        and keras.backend.is_int_dtype(variable.dtype)
        and tuple(variable.shape) == (2,)
    ]


def split_seed_states(model: keras.Model, rank: int) -> None:
    """Give a rank streams of its own, made of generators' states that are equal on all ranks."""
    for state in seed_states(model):
        seed, count = state.numpy().tolist()
        state.assign([rank_seed(seed, rank, count), 0])


def _mixed(own: int, given: list[int]) -> list[int]:
    (number,) = np.random.SeedSequence([own, *(abs(part) for part in given)]).generate_state(1)
    # Keras takes seeds modulo nearly 2**31.
    return [int(number) >> 1, 0]


def _tensorflow_generators(model: keras.Model) -> Iterator[tf.random.Generator]:
    for layer in all_layers(model):
        for value in vars(layer).values():
            if isinstance(value, tf.random.Generator):
                yield value
