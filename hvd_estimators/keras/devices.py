"""Devices and threads of TensorFlow in a rank."""

from __future__ import annotations

import os

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_estimators.keras.collectives import exchange, gather_numbers
from hvd_estimators.launch.gpus import check_gpus, describe_gpus, gpu_index, own_gpu
from hvd_estimators.training.progress import notify_driver

__all__ = ["choose_devices", "limit_threads"]


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
    # Before the first exchange, with which TensorFlow takes what it sees.
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
        notify_driver(line, verbose)


def limit_threads() -> None:
    """Set TensorFlow's thread count to ``OMP_NUM_THREADS``, unless TensorFlow has started."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        try:
            tf.config.threading.set_intra_op_parallelism_threads(int(threads))
        except RuntimeError:
            return
