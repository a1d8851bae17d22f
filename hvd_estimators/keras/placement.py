"""Where TensorFlow predicts: on which device, with how many threads. Runs where it does."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from hvd_estimators.inference.resources import Resources

__all__ = ["CPU", "place"]

CPU = "/CPU:0"


def place(resources: Resources) -> str:
    """Let TensorFlow use some threads, and return the device to predict on.

    What cannot be changed any more, as TensorFlow has begun, stays as it is.

    Parameters
    ----------
    resources : Resources
        Threads and GPU. Without a GPU TensorFlow sees none; with one it sees all of the process's,
        as later tasks may have others, and takes only the memory that it needs there.

    Raises
    ------
    GpuError
        If TensorFlow does not see the GPU among others.
    """
    threads = resources.num_threads
    if threads is not None:
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    seen = tf.config.list_physical_devices("GPU") if resources.gpu is not None else []
    gpu = resources.among(len(seen))
    with contextlib.suppress(RuntimeError):
        if gpu is None:
            tf.config.set_visible_devices([], "GPU")
        for found in seen:
            tf.config.experimental.set_memory_growth(found, True)
    return CPU if gpu is None else f"/GPU:{gpu}"
