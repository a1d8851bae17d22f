"""Keras optimizers that apply the mean of all ranks' gradients. Runs on the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.backend import inner_optimizers, outside_functions, runs_eagerly
from hvd_estimators.keras.collectives import GradientAverager

ops: Any = keras.ops


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    compression: Any = None,
    backward_passes_per_step: int = 1,
) -> keras.optimizers.Optimizer:
    """Make an optimizer average gradients over all ranks before it applies them.

    Call ``horovod.tensorflow.init()`` first, or else the ranks use torch's default process group,
    which `hvd_estimators.run` can make. The function changes the given optimizer in place. The
    optimizer keeps its class, configuration and state, so a model that is saved with it loads
    without this package. Gradients are averaged before they are clipped. Pass a
    `keras.optimizers.LossScaleOptimizer` directly, not its inner optimizer, so that all ranks skip
    the same steps.

    Works with ``Model.fit``, and with direct calls of ``apply`` or ``apply_gradients`` if all ranks
    make the same number of calls. For ``Model.fit``, compile with ``jit_compile=False``, because
    XLA cannot compile the operations between ranks.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Any optimizer.
    compression : compressor, optional
        An object with ``compress`` and ``decompress``, for example
        ``horovod.tensorflow.Compression.fp16``.
    backward_passes_per_step : int
        Number of calls whose gradients the rank averages before a reduction and a step.

    Returns
    -------
    keras.optimizers.Optimizer
        The same optimizer.

    Raises
    ------
    ParamError
        If the optimizer averages already, or ``backward_passes_per_step`` is below 1.

    Examples
    --------
    >>> hvd.init()
    >>> optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    >>> model.compile(optimizer, loss="mse", jit_compile=False)
    >>> model.fit(dataset, callbacks=[BroadcastCallback(), MetricAverageCallback()])
    """
    if backward_passes_per_step < 1:
        raise ParamError(
            f"backward_passes_per_step: expected 1 or more, found {backward_passes_per_step}."
        )
    distribute(optimizer, GradientAverager(compression), backward_passes_per_step)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer averages gradients over the ranks."""
    return "apply" in vars(optimizer)


def distribute(
    optimizer: keras.optimizers.Optimizer,
    averager: GradientAverager,
    passes_per_step: int = 1,
    steps_per_epoch: int | None = None,
    learning_rate_scale: float = 1.0,
    calls: int = 0,
) -> None:
    """Make an optimizer's ``apply`` average gradients before it applies them.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        The optimizer. Its ``apply`` is replaced, on this instance only.
    averager : GradientAverager
        Averages the gradients.
    passes_per_step : int
        Number of calls (micro-batches) that add up to one step.
    steps_per_epoch : int, optional
        Calls per epoch. The end of an epoch also makes a step, with the gradients summed so far.
    learning_rate_scale : float
        Factor for the learning rate that the optimizer applies. ``optimizer.learning_rate`` and
        the rates from callbacks and schedules do not change.
    calls : int
        Calls of the first epoch that an earlier part of the run made; always whole steps.
    """
    if is_distributed(optimizer):
        raise ParamError("optimizer: it averages gradients over ranks already. Wrap it once.")
    apply = optimizer.apply

    uses = _Uses()

    def step(gradients: Sequence[Any], weight: Any, variables: Any) -> None:
        averaged = uses.remove(averager.average(gradients, weight))
        if not optimizer.built and learning_rate_scale != 1.0:
            # The optimizer may choose its inner optimizers only in build().
            optimizer.build(list(variables))
        with _scaled_learning_rates(optimizer, learning_rate_scale):
            apply(averaged, variables)

    def weigh(grads: Sequence[Any], variables: Any) -> tuple[list[Any], Any]:
        weight = 1.0 if averager.weight is None else averager.weight
        if variables is None and not optimizer.built:
            apply(grads)  # Raises Keras's own error about missing variables.
        of = optimizer._trainable_variables if variables is None else variables
        return uses.add(averager.weigh(grads, of), of), weight

    if passes_per_step == 1:

        def averaged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            step(*weigh(grads, trainable_variables), trainable_variables)

    else:
        accumulator = _Accumulator(passes_per_step, steps_per_epoch, calls)

        def averaged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            if not optimizer.built:
                # Not in the branch below, which cannot create variables.
                optimizer.build(list(trainable_variables))
            due = accumulator.add(*weigh(grads, trainable_variables))
            ops.cond(
                due,
                lambda: accumulator.release(lambda g, w: step(g, w, trainable_variables)),
                lambda: None,
            )

    optimizer.apply = averaged_apply


class _Uses:
    """Record of variables that have gradients on any rank, if models run eagerly.

    Such a model may skip a layer in a batch of one rank, for example at random, and the layer's
    variables then have no gradient there. All ranks still have to reduce the same tensors, so zeros
    take the place of these gradients. One more tensor tells which were not replaced. A variable
    that no rank used has no gradient, as in one process.
    """

    def __init__(self) -> None:
        self._are_replaced = False

    def add(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Replace what is missing by zeros, and append 1 or 0 for each gradient, and 1."""
        if not runs_eagerly():
            # The function is traced once, and what it misses is the same on all ranks.
            return gradients
        are_used = [gradient is not None for gradient in gradients]
        self._are_replaced |= not all(are_used)
        used = ops.cast(ops.convert_to_tensor([*are_used, True]), "float32")
        filled = [
            ops.zeros(v.shape, v.dtype) if g is None else g
            for g, v in zip(gradients, variables, strict=True)
        ]
        return [*filled, used]

    def remove(self, gradients: list[Any]) -> list[Any]:
        """Return the averaged gradients, None for what no rank has used."""
        if not runs_eagerly():
            return gradients
        *gradients, used = gradients
        if not self._are_replaced:
            return gradients
        self._are_replaced = False
        # Read only here, because a GPU has to finish all its work first.
        *shares, of_all = ops.convert_to_numpy(used)
        # Batches without weight average to zeros, also here.
        return [g if n or not of_all else None for g, n in zip(gradients, shares, strict=True)]


class _Accumulator:
    """Sum of gradients between two steps, in variables outside the optimizer."""

    def __init__(self, passes: int, steps_per_epoch: int | None, calls: int = 0) -> None:
        self._passes = passes
        self._steps_per_epoch = steps_per_epoch
        self._first = calls
        self._sums: list[Any] | None = None

    def add(self, gradients: Sequence[Any], weight: Any) -> Any:
        """Add gradients and their weight, and return whether a step is due."""
        if self._sums is None:
            with outside_functions():
                self._sums = [None if g is None else _zero(g.shape, g.dtype) for g in gradients]
                self._weight = _zero((), "float32")
                self._calls = _zero((), "int64")
                self._calls.assign(self._first)
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None:
                total.assign_add(gradient)
        self._weight.assign_add(ops.cast(weight, "float32"))
        calls = ops.convert_to_tensor(self._calls) + 1
        due = ops.equal(calls % self._passes, 0)
        if self._steps_per_epoch is not None:
            at_end = ops.equal(calls, self._steps_per_epoch)
            due = ops.logical_or(due, at_end)
            calls = ops.where(at_end, ops.zeros_like(calls), calls)
        self._calls.assign(calls)
        return due

    def release(self, step: Any) -> None:
        """Make a step with the summed gradients, and reset them to zero."""
        assert self._sums is not None
        step(
            [None if v is None else ops.convert_to_tensor(v) for v in self._sums],
            ops.convert_to_tensor(self._weight),
        )
        for total in [*self._sums, self._weight]:
            if total is not None:
                total.assign(ops.zeros_like(total))


def _zero(shape: Any, dtype: Any) -> keras.Variable:
    dtype = keras.backend.standardize_dtype(dtype)
    return keras.Variable("zeros", shape=tuple(shape), dtype=dtype, trainable=False)


@contextlib.contextmanager
def _scaled_learning_rates(optimizer: keras.optimizers.Optimizer, scale: float) -> Iterator[None]:
    """Multiply the optimizers' learning rates while a step is computed or traced."""
    if scale == 1.0:
        yield
        return
    given = []
    for inner in inner_optimizers(optimizer):
        attributes = vars(inner)
        given.append((attributes, attributes["_learning_rate"]))
        # Read here, because the rate is a number or a schedule's value for this step.
        rate = ops.convert_to_tensor(inner.learning_rate)
        attributes["_learning_rate"] = rate * ops.cast(scale, rate.dtype)
    try:
        yield
    finally:
        for attributes, rate in given:
            attributes["_learning_rate"] = rate
