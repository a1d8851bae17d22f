"""Questions about Keras and the parts of its models, on both sides."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.exceptions import DependencyError


def require_tensorflow() -> None:
    """Check that Keras runs on TensorFlow.

    Raises
    ------
    DependencyError
        If Keras runs on another backend, for which this package has no collectives.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise DependencyError(
            f"Keras runs on the backend {backend!r}; hvd_estimators.keras needs 'tensorflow'. Set "
            "the environment variable KERAS_BACKEND=tensorflow before keras is imported (it takes "
            "precedence over ~/.keras/keras.json)."
        )


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that have a learning rate: the given one, or those it wraps."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return inner_optimizers(optimizer.inner_optimizer)
    # Keras has had it since 3.13 only.
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    if multi is not None and isinstance(optimizer, multi):
        return list(optimizer.optimizers)
    return [optimizer]


def rated_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return all optimizers of a model that have a learning rate."""
    return [o for each in model_optimizers(model) for o in inner_optimizers(each)]


def learning_rates(model: keras.Model) -> list[float]:
    """Return the current learning rates of a model's optimizers, as far as they have one."""
    rates = [getattr(optimizer, "learning_rate", None) for optimizer in rated_optimizers(model)]
    # As text, so that a 32-bit 0.05 becomes 0.05 and not 0.05000000074505806.
    return [float(str(np.asarray(rate)[()])) for rate in rates if rate is not None]


def has_own_compile(model: keras.Model) -> bool:
    """Return whether a model's class overrides ``compile``."""
    return type(model).compile is not keras.Model.compile


def has_own_step(model: keras.Model) -> bool:
    """Return whether a model has its own ``train_step``."""
    return type(model).train_step is not keras.Model.train_step


def has_own_test_step(model: keras.Model) -> bool:
    """Return whether a model has its own ``test_step``."""
    return type(model).test_step is not keras.Model.test_step


def is_keras(entry: Any) -> bool:
    """Return whether a class or function is one of Keras's own."""
    return str(getattr(entry, "__module__", "")).partition(".")[0] == "keras"


def function_of(entry: Any) -> Any:
    """Return the function that a loss or metric wraps, or the loss or metric."""
    wrapped = getattr(entry, "fn", None) or getattr(entry, "_fn", None)
    return entry if wrapped is None else wrapped


def all_layers(layer: keras.Layer, include_self: bool = True) -> list[keras.Layer]:
    """Return a layer or model and all layers below it, including those in layer attributes.

    Keras's public API lists only a model's direct layers.
    """
    return list(layer._flatten_layers(include_self=include_self))


def model_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return all optimizers of a model: its own first, then those in attributes of its layers."""
    values = [getattr(model, "optimizer", None)]
    for layer in all_layers(model):
        for value in list(vars(layer).values()):
            if isinstance(value, Mapping):
                values += value.values()
            else:
                values += value if isinstance(value, (list, tuple)) else [value]
    optimizers = (value for value in values if isinstance(value, keras.optimizers.Optimizer))
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())


def further_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers in attributes of a model and its layers, besides ``optimizer``."""
    own = getattr(model, "optimizer", None)
    return [optimizer for optimizer in model_optimizers(model) if optimizer is not own]


def optimizer_positions(
    model: keras.Model, variables: Sequence[keras.Variable] | None = None
) -> list[list[int]]:
    """Return the positions that `build_optimizers` takes for another copy of a model.

    Parameters
    ----------
    model : keras.Model
        The model.
    variables : sequence of keras.Variable, optional
        The model's variables in the order of the copy. Default: the model's own order.

    Returns
    -------
    list of list of int
        For each of `further_optimizers`, the positions of the variables that it trains. Empty if
        the optimizer is not built.
    """
    all_variables = model.variables if variables is None else variables
    positions = {id(variable): number for number, variable in enumerate(all_variables)}
    return [
        # An optimizer of variables outside of the model stays without a state in copies.
        [positions[id(v)] for v in optimizer._trainable_variables if id(v) in positions]
        if optimizer.built
        else []
        for optimizer in further_optimizers(model)
    ]


def build_optimizers(model: keras.Model, positions: Sequence[Sequence[int]]) -> None:
    """Build the optimizers in a model's attributes, so that their states can be loaded."""
    variables = model.variables
    for optimizer, of_optimizer in zip(further_optimizers(model), positions, strict=False):
        if of_optimizer and not optimizer.built:
            optimizer.build([variables[number] for number in of_optimizer])


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore Python's and NumPy's random states after the block: Keras draws seeds from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def to_dense(gradient: Any) -> Any:
    """Return a gradient as one tensor; TensorFlow's gradients of embeddings are slices."""
    if keras.backend.backend() != "tensorflow":
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def multiply_no_nan(values: Any, factor: Any) -> Any:
    """Return the product, and 0 where the factor is 0 and the value NaN or infinite."""
    if keras.backend.backend() != "tensorflow":
        return keras.ops.where(factor == 0, keras.ops.zeros_like(values), values * factor)
    import tensorflow as tf

    return tf.math.multiply_no_nan(values, factor)


def ordered(after: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Make operations of the block run after the given tensors are computed."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    import tensorflow as tf

    return tf.control_dependencies(after)


def outside_functions() -> contextlib.AbstractContextManager[Any]:
    """Create variables of the block outside of the functions that TensorFlow traces."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    import tensorflow as tf

    return tf.init_scope()
