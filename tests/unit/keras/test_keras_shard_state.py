"""Per-rank random numbers from all sources."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.keras.collectives import StatisticsAverager
from hvd_estimators.keras.shard_state import RandomStreams, VariableState, split_seed_states


class Draws(keras.layers.Layer):
    """Layer that adds random numbers of one source, and records them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.notes: Any = lambda notes=[]: notes
        self.own = keras.random.SeedGenerator(5)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        shape = (3,)
        numbers = {
            "own": lambda: keras.random.uniform(shape, seed=self.own),
            "keras": lambda: keras.random.uniform(shape),
            "tensorflow": lambda: tf.random.uniform(shape),
            "numpy": lambda: tf.py_function(lambda: np.random.rand(3), [], tf.float32),
            "python": lambda: tf.py_function(lambda: np.full(3, random.random()), [], tf.float32),
        }[self.source]()

        def note(values: Any) -> np.int32:
            self.notes().append(tuple(values.numpy().tolist()))
            return np.int32(0)

        with tf.control_dependencies([tf.py_function(note, [numbers], tf.int32)]):
            return x + tf.reduce_sum(numbers)


def drawn(source: str, rank: int, first_epoch: int = 0) -> list[tuple[float, ...]]:
    """Return the numbers drawn in two steps per epoch of a part of a run."""
    keras.utils.set_random_seed(1)
    layer = Draws(source)
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    streams = RandomStreams(model, 9, rank, first_epoch)
    model.fit(
        np.zeros((2, 1)),
        np.zeros((2, 1)),
        batch_size=1,
        initial_epoch=first_epoch,
        epochs=3,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: streams.begin(rank, epoch)
            )
        ],
    )
    return list(layer.notes())


@pytest.mark.parametrize("source", ["own", "keras", "tensorflow", "numpy", "python"])
def test_draws_differ_between_steps_and_are_reproduced_on_resume(source: str) -> None:
    ranks = [drawn(source, rank) for rank in (0, 1)]
    assert len({*ranks[0], *ranks[1]}) == 2 * 3 * 2
    assert drawn(source, 1) == ranks[1]
    resumed = drawn(source, 1, first_epoch=2)
    if source == "tensorflow":
        # The state cannot be set; at least no draw repeats.
        assert not set(resumed) & {*ranks[0], *ranks[1]}
    else:
        assert resumed == ranks[1][4:]


def test_only_generators_with_the_same_seed_draw_the_same() -> None:
    layers = [keras.layers.Dropout(0.5, seed=seed) for seed in (1, 1, 2, None)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    streams = RandomStreams(model, 9, 0)
    streams.begin(0, 4)
    states = [tuple(layer.seed_generator.state.numpy()) for layer in layers]
    assert states[0] == states[1]
    assert len(set(states)) == 3


def test_broadcast_states_are_split_by_rank() -> None:
    layer = keras.layers.Dropout(0.5, seed=1)
    model = keras.Sequential([keras.Input((1,)), layer])
    states = set()
    for rank in range(3):
        layer.seed_generator.state.assign([1, 0])
        split_seed_states(model, rank)
        states.add(tuple(layer.seed_generator.state.numpy()))
    assert len(states) == 3


def test_weights_that_do_not_change_are_not_kept_for_each_shard() -> None:
    base = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
    base.trainable = False
    adapted = [keras.layers.Dense(3), keras.layers.Dense(5)]
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), base, *adapted, norm])
    adapted[1].quantize("int8")
    for layer in adapted:
        layer.enable_lora(2)
    kept = {id(variable) for variable in VariableState(model).variables}
    assert kept == {id(norm.moving_mean), id(norm.moving_variance)}
    # A single shard has nothing to average, and looks for no changes.
    assert not StatisticsAverager(model, 1).digests
    assert len(StatisticsAverager(model, 2).digests) >= len(kept)
