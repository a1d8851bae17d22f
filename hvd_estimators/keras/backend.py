"""Keras backend checks and TensorFlow device selection, on the driver and on ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_estimators.exceptions import DependencyError
from hvd_estimators.keras.collectives import exchange, gather_numbers
from hvd_estimators.launch.gpus import check_gpus, describe_gpus, gpu_index, own_gpu
from hvd_estimators.training.progress import tell_driver

__all__ = [
    "all_layers",
    "choose_devices",
    "has_own_compile",
    "inner_optimizers",
    "limit_threads",
    "model_optimizers",
    "require_tensorflow",
]


def choose_devices(use_gpu: bool, verbose: int = 1) -> None:
    """Make at most one GPU visible to TensorFlow, and limit its threads to the rank's cores.

    Parameters
    ----------
    use_gpu : bool
        Whether to use GPUs.
    verbose : int
        If 1 or above, rank 0 reports the GPUs of all ranks to the driver.

    Raises
    ------
    GpuError
        If only some ranks see a GPU, or if two ranks share a GPU although NCCL reduces.
    """
    limit_threads()
    gpus = tf.config.list_physical_devices("GPU") if use_gpu else []
    index = gpu_index(len(gpus), hvd.local_rank())
    chosen = [] if index is None else [gpus[index]]
    # Must precede the first exchange: TensorFlow then takes all visible devices.
    tf.config.set_visible_devices(chosen, "GPU")
    for gpu in chosen:
        tf.config.experimental.set_memory_growth(gpu, True)
    available = gather_numbers(bool(chosen), "hvd_estimators.gpus")
    check_gpus([bool(has_gpu) for has_gpu in available])
    if index is None:
        return
    used = exchange.gather(own_gpu(index), "hvd_estimators.gpus")
    kind = tf.config.experimental.get_device_details(gpus[index]).get("device_name", "GPU")
    line = describe_gpus(used, str(kind), bool(hvd.nccl_built()))
    if hvd.rank() == 0:
        tell_driver(line, verbose)


def limit_threads() -> None:
    """Set TensorFlow's thread count to ``OMP_NUM_THREADS``, unless TensorFlow has started."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        try:
            tf.config.threading.set_intra_op_parallelism_threads(int(threads))
        except RuntimeError:
            return


def require_tensorflow() -> None:
    """Check that Keras runs on TensorFlow.

    Raises
    ------
    DependencyError
        If Keras runs on another backend, for which this package has no collectives.
    """
    found = keras.backend.backend()
    if found != "tensorflow":
        raise DependencyError(
            f"Keras runs on the backend {found!r}; hvd_estimators.keras needs 'tensorflow'. Set "
            "the environment variable KERAS_BACKEND=tensorflow before keras is imported (it takes "
            "precedence over ~/.keras/keras.json)."
        )


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that have a learning rate: the given one, or those it wraps."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return inner_optimizers(optimizer.inner_optimizer)
    # Keras has MultiOptimizer since version 3.13.
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    if multi is not None and isinstance(optimizer, multi):
        return list(optimizer.optimizers)
    return [optimizer]


def has_own_compile(model: keras.Model) -> bool:
    """Return whether a model's class overrides ``compile``."""
    return type(model).compile is not keras.Model.compile


def all_layers(layer: keras.Layer, include_self: bool = True) -> list[keras.Layer]:
    """Return a layer or model and all layers below it, including those in layer attributes.

    Keras's public API lists only a model's direct layers.
    """
    return list(layer._flatten_layers(include_self=include_self))


def model_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return all optimizers of a model: its own first, then those in attributes of its layers."""
    found = [model.optimizer]
    for layer in all_layers(model):
        for value in list(vars(layer).values()):
            if isinstance(value, Mapping):
                found += value.values()
            else:
                found += value if isinstance(value, (list, tuple)) else [value]
    optimizers = (value for value in found if isinstance(value, keras.optimizers.Optimizer))
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())
