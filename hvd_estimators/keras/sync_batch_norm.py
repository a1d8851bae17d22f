"""``BatchNormalization(synchronized=True)``: statistics over a step's rows on all ranks.

Keras synchronizes only over the replicas of a ``tf.distribute`` strategy. Runs in the rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvd_estimators.keras.backend import all_layers, multiply_no_nan
from hvd_estimators.keras.collectives import GradientAverager, current, sum_tensors

ops: Any = keras.ops


def synchronized_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers of a model that must be synchronized."""
    return [
        layer
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]


class SynchronizedMoments:
    """Make a model's synchronized layers compute means and variances over all ranks.

    Parameters
    ----------
    model : keras.Model
        Its layers are changed, but only these instances.
    averager : GradientAverager
        Holds the weight of the rank's batch.
    """

    def __init__(self, model: keras.Model, averager: GradientAverager) -> None:
        self._averager = averager
        self._calls: dict[int, int] | None = None
        for number, layer in enumerate(synchronized_layers(model)):
            layer._moments = self._moments_of(layer, number)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Synchronize while a training step runs or is traced; all ranks must run as many steps."""
        self._calls = {}
        try:
            yield
        finally:
            self._calls = None

    def _moments_of(self, layer: Any, number: int) -> Callable[[Any, Any], Any]:
        alone = layer._moments

        def moments(inputs: Any, mask: Any) -> Any:
            if self._calls is None or current().size == 1:
                return alone(inputs, mask)
            # A layer that is called several times in a step synchronizes each time.
            call = self._calls[number] = self._calls.get(number, -1) + 1
            rank = len(inputs.shape)
            axes = [axis for axis in range(rank) if axis != layer.axis % rank]
            return self._moments(inputs, mask, axes, f"moments.{number}.{call}")

        return moments

    def _moments(self, inputs: Any, mask: Any, axes: list[int], name: str) -> Any:
        present: Any = None
        if mask is None:
            sizes = ops.shape(inputs)
            count = math.prod(sizes[axis] for axis in axes)
        else:
            present = ops.broadcast_to(ops.cast(mask, "bool")[..., None], ops.shape(inputs))
            count = ops.sum(ops.cast(mask, "float32"))
        count = ops.cast(count, inputs.dtype)

        def total(values: Any) -> Any:
            return ops.sum(values if present is None else ops.where(present, values, 0), axis=axes)

        mean = ops.divide_no_nan(total(inputs), count)
        shape = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
        squares = total(ops.square(inputs - ops.reshape(mean, shape)))
        # Separate entries for each rank's statistics give the precision of one process.
        own = ops.concatenate([ops.reshape(count, (1,)), mean, squares], axis=0)
        one_hot = ops.one_hot(current().rank, current().size, dtype=inputs.dtype)[:, None]
        stops = [1, 1 + mean.shape[0]]
        counts, means, squares = ops.split(self._sum(one_hot * own, name), stops, axis=1)
        rows = ops.sum(counts)
        if mask is not None:
            # As in Keras: all rows may be masked.
            rows += keras.backend.epsilon()
        mean = ops.sum(counts * means, axis=0) / rows
        squares = ops.sum(squares + counts * ops.square(means - mean), axis=0)
        return mean, squares / rows

    def _sum(self, values: Any, name: str) -> Any:
        """Return the sum over ranks, with a gradient for the loss of all ranks.

        The gradient is the sum of the ranks' gradients, each times its batch's weight, divided by
        this rank's weight. The averager later multiplies the rank's gradients by this weight.
        """
        weight = self._averager.weight
        weight = ops.cast(1.0 if weight is None else weight, values.dtype)

        @ops.custom_gradient
        def summed(values: Any) -> Any:
            def gradient(*arguments: Any, upstream: Any = None) -> Any:
                # Keras passes the gradient by its name on torch only.
                upstream = arguments[0] if upstream is None else upstream
                total = sum_tensors(multiply_no_nan(upstream, weight), f"{name}.gradient")
                return ops.divide_no_nan(total, weight)

            return sum_tensors(values, name), gradient

        return summed(values)
