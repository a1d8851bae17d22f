"""Check whether a model's own training step allows several batches per step. Runs on the driver."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from hvd_estimators.fitting.trial import traceless
from hvd_estimators.keras.backend import CPU, model_optimizers, on_tensorflow
from hvd_estimators.keras.shard_state import VariableState, seed_states


def why_one_batch_per_step(model: keras.Model, batch: Any) -> str | None:
    """Return why a model's ``train_step`` needs steps of one batch of each rank, or None.

    With several batches per step, the optimizer applies their summed gradients in the last one. So
    ``train_step`` must apply one optimizer once, and may not change weights in another way. The
    exceptions are variables that layers compute from their batches before, such as statistics.

    On TensorFlow the step is traced, as in ``fit``, and not run.

    Parameters
    ----------
    model : keras.Model
        A compiled copy that is not used for anything else.
    batch : structure of arrays
        The argument of ``train_step``.

    Returns
    -------
    str or None
        The reason, as the end of a sentence about ``train_step``.
    """
    try:
        with keras.device(CPU), traceless():
            # Creates the variables.
            _traced(model, batch)
            step = _Step(model)
            outer = _traced(model, batch)
    except Exception as error:
        return f"cannot be traced on the driver ({type(error).__name__}: {error})"
    if len(step.applied_in) > 1:
        return f"applies optimizers {len(step.applied_in)} times per batch"
    if on_tensorflow() and any(graph is not outer for graph in step.applied_in):
        return "applies its optimizer in a condition or loop"
    return None if step.changed is None else f"changes the variable {step.changed!r} in each batch"


def _traced(model: keras.Model, batch: Any) -> Any:
    """Trace the training step, and return the graph that it starts in; torch runs the step."""
    graphs = []

    def step(data: Any) -> Any:
        graphs.append(_graph())
        return model.train_step(data)

    tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
    if not on_tensorflow():
        return step(tensors)
    import tensorflow as tf

    tf.function(step, autograph=False).get_concrete_function(tensors)
    return graphs[-1]


def _graph() -> Any:
    if not on_tensorflow():
        return None
    import tensorflow as tf

    return tf.compat.v1.get_default_graph()


class _Step:
    """Record of what a traced step does to the variables of a model.

    Attributes
    ----------
    applied_in : list
        The graph of each call of an optimizer.
    changed : str or None
        A variable that the step must change only once, but that it changes in every batch.
    """

    def __init__(self, model: keras.Model) -> None:
        self.applied_in: list[Any] = []
        self.changed: str | None = None
        self._is_applying = False
        self._computed = {id(variable) for variable in VariableState(model).variables}
        for optimizer in model_optimizers(model):
            # Bypasses Keras's attribute tracking.
            vars(optimizer)["apply"] = functools.partial(self._apply, optimizer.apply)
        seeds = {id(state) for state in seed_states(model)}
        for variable in model.variables:
            if id(variable) not in seeds:
                assign = functools.partial(self._assign, variable, variable.assign)
                vars(variable)["assign"] = assign

    def _apply(self, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_applying:
            # An optimizer that another one wraps.
            return apply(*args, **kwargs)
        self.applied_in.append(_graph())
        self._is_applying = True
        try:
            return apply(*args, **kwargs)
        finally:
            self._is_applying = False

    def _assign(self, variable: Any, assign: Callable[[Any], Any], value: Any) -> Any:
        is_computed = id(variable) in self._computed and not self.applied_in
        if not (self._is_applying or is_computed):
            self.changed = variable.path
        return assign(value)
