"""Questions about Keras and the parts of its models, on both sides."""

from __future__ import annotations

import contextlib
import copyreg
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np

from hvd_estimators._util.unpickle_imports import set_first
from hvd_estimators.exceptions import DependencyError


def on_tensorflow() -> bool:
    """Return whether Keras runs on TensorFlow; otherwise it runs on torch."""
    return bool(keras.backend.backend() == "tensorflow")


def require_backend() -> None:
    """Check that Keras runs on TensorFlow or torch.

    Raises
    ------
    DependencyError
        If Keras runs on another backend, for which this package has no collectives.
    """
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "torch"):
        raise DependencyError(
            f"Keras runs on the backend {backend!r}; hvd_estimators.keras needs 'tensorflow' or "
            "'torch'. Set the environment variable KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch "
            "before keras is imported (it takes precedence over ~/.keras/keras.json)."
        )


# Before the imports below, which other backends do not need.
require_backend()

if on_tensorflow():
    import tensorflow as tf

    SHAPE_KINDS: tuple[type[Exception], ...] = (tf.errors.InvalidArgumentError,)
    """The backend's exceptions for wrong shapes, in addition to Python's own."""

else:
    import torch

    SHAPE_KINDS = (RuntimeError, IndexError)
    # Spark's workers would load models on TensorFlow.
    set_first("KERAS_BACKEND", "torch")
    # cloudpickle sends it with functions that use both torch and ``ops``, such as Keras's.
    copyreg.pickle(type(torch.ops), lambda module: (getattr, (torch, "ops")))

_CONFIG = ("floatx", "epsilon", "image_data_format")


def config() -> dict[str, Any]:
    """Return Keras's settings that layers and functions read when they are created or called."""
    return {name: getattr(keras.config, name)() for name in _CONFIG}


def configure(settings: Mapping[str, Any]) -> None:
    """Apply the settings that `config` returned."""
    for name, value in settings.items():
        getattr(keras.config, f"set_{name}")(value)


CPU = "cpu:0" if on_tensorflow() else "cpu"
"""Name of the CPU for `keras.device`. With another name, torch's parameters would be copies."""


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
    numbers = [keras.ops.convert_to_numpy(rate) for rate in rates if rate is not None]
    return [float(str(number[()])) for number in numbers]


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
    """Return the function that a loss wraps, or the loss."""
    return getattr(entry, "fn", None) or entry


def all_layers(layer: keras.Layer, include_self: bool = True) -> list[keras.Layer]:
    """Return a layer or model and all layers below it, including those in layer attributes.

    Keras's public API lists only a model's direct layers.
    """
    return list(layer._flatten_layers(include_self=include_self))


def torch_layers(model: keras.Model) -> list[Any]:
    """Return a model's layers that hold a torch module."""
    return [x for x in all_layers(model) if isinstance(x, keras.layers.TorchModuleWrapper)]


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


def set_random_seed(seed: int) -> None:
    """Seed all generators as `keras.utils.set_random_seed`, without an import of TensorFlow."""
    if on_tensorflow():
        keras.utils.set_random_seed(seed)
        return
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def to_dense(value: Any) -> Any:
    """Return a value as one tensor; TensorFlow also has variables, and slices as gradients."""
    if not on_tensorflow():
        return value
    return tf.convert_to_tensor(value)


def multiply_no_nan(values: Any, factor: Any) -> Any:
    """Return the product, and 0 where the factor is 0 and the value NaN or infinite."""
    if not on_tensorflow():
        return keras.ops.where(factor == 0, keras.ops.zeros_like(values), values * factor)
    return tf.math.multiply_no_nan(values, factor)


def ordered(after: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Make operations of the block run after the given tensors are computed."""
    if not on_tensorflow():
        return contextlib.nullcontext()
    return tf.control_dependencies(after)


def outside_functions() -> contextlib.AbstractContextManager[Any]:
    """Create variables of the block outside of the functions that TensorFlow traces."""
    if not on_tensorflow():
        return contextlib.nullcontext()
    return tf.init_scope()


def runs_eagerly() -> bool:
    """Return whether operations run at once, and are not traced by TensorFlow."""
    return not on_tensorflow() or bool(tf.executing_eagerly())


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes no gradients, as TensorFlow runs it fastest."""
    if on_tensorflow():
        # Keras runs its steps without AutoGraph, too.
        return tf.function(function, autograph=False, reduce_retracing=True)
    return torch.no_grad()(function)


def snapshot(value: Any) -> Any:
    """Return a variable's current value, which later assignments do not change."""
    if on_tensorflow():
        # Shares the variable's memory until the variable changes.
        return tf.convert_to_tensor(value)
    return keras.ops.convert_to_tensor(value).detach().clone()


def is_tensorflow_variable(value: Any) -> bool:
    """Return whether a value is TensorFlow's own variable, of which Keras takes no notice."""
    return on_tensorflow() and isinstance(value, tf.Variable)


def num_dimensions(tensor: Any) -> int | None:
    """Return the number of a tensor's dimensions; None if TensorFlow does not know it."""
    rank: int | None = tensor.shape.rank if on_tensorflow() else len(tensor.shape)
    return rank


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's type for a type of Keras, bfloat16 and others of ``ml_dtypes`` among them."""
    return np.dtype(getattr(ml_dtypes, name, name))
