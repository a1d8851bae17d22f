"""Python workers that predict: their cached predictor and their task's CPU threads and GPU.

Imports no framework.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
from collections.abc import Callable, MutableMapping
from typing import Any

import cloudpickle

from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.inference.batch import DEFAULT_RESOURCES, Predictor, Resources
from hvd_estimators.inference.broadcast import Hashed, Sent, as_bytes, received
from hvd_estimators.inference.errors import naming_missing_modules
from hvd_estimators.launch.gpus import VISIBLE_VARIABLE, assigned_gpus, visible_gpus
from hvd_estimators.launch.rank.output import LOG_LEVEL_VARIABLE

_THREADS_VARIABLE = "OMP_NUM_THREADS"


def predictor_key(hashed: Hashed, load: Callable[..., Any]) -> str:
    """Return the predictor's cache key: a digest of the payload and of ``load``.

    Models with different settings make different predictors from one payload. Therefore ``load``
    is pickled with all objects that it refers to.
    """
    return hashlib.sha256(hashed.digest.encode() + cloudpickle.dumps(load)).hexdigest()


# A Python worker serves many tasks, and unpickles a model only once.
_predictors: dict[tuple[str, Resources], Predictor] = {}


def unpickled(sent: Sent) -> Any:
    """Return the objects that the driver has pickled for a task.

    TensorFlow, which this may import, does not log its notices unless its log level is set.
    """
    if LOG_LEVEL_VARIABLE not in os.environ:
        os.environ[LOG_LEVEL_VARIABLE] = "2" if visible_gpus(os.environ) else "3"
    with received(sent) as pickled:
        return loads(as_bytes(pickled))


def cached_predictor(
    key: str, model: Sent, load: Callable[..., Predictor], resources: Resources = DEFAULT_RESOURCES
) -> Predictor:
    """Return the predictor with a key, and load it if the worker has no predictor with that key.

    The worker caches only one predictor.

    Parameters
    ----------
    key : str
        The cache key, see `predictor_key`.
    model : Sent
        The payload.
    load : callable
        Makes a predictor from the payload, or from the payload and the resources.
    resources : Resources
        Resources of the task. Different resources need a different predictor.
    """
    predictor = _predictors.get((key, resources))
    if predictor is not None:
        return predictor
    gc.unfreeze()
    _predictors.clear()
    with received(model) as document, naming_missing_modules():
        made = load(document, resources) if _takes_resources(load) else load(document)
        _predictors[key, resources] = made
    # PySpark collects garbage after each task. The collector would scan all objects of an imported
    # framework each time, for 100 ms or more.
    gc.collect()
    gc.freeze()
    return made


def _takes_resources(load: Callable[..., Predictor]) -> bool:
    """Return whether a function takes resources; the function of a custom model may not."""
    try:
        inspect.signature(load).bind(b"", DEFAULT_RESOURCES)
    except TypeError:
        return False
    return True


def task_resources(task: Any, env: MutableMapping[str, str] = os.environ) -> Resources:
    """Return the resources of a Spark task. Runs in the task's Python worker.

    Parameters
    ----------
    task : TaskContext or None
        The task; None outside of a task.
    env : mapping
        The worker's environment. Spark sets ``OMP_NUM_THREADS`` there to ``spark.task.cpus``,
        unless ``spark.executorEnv.OMP_NUM_THREADS`` is set. If ``CUDA_VISIBLE_DEVICES`` is not set
        and the GPU has no number, this function sets the variable to the GPU's address.

    Raises
    ------
    GpuError
        If the worker does not see the task's GPU.
    """
    given = env.get(_THREADS_VARIABLE, "")
    num_threads = int(given) if given.isdigit() and int(given) else None
    if task is None:
        return Resources(num_threads)
    assigned = task.resources().get("gpu")
    gpu = _number(assigned.addresses[0], env) if assigned else None
    return Resources(num_threads or task.cpus(), gpu)


def _number(address: str, env: MutableMapping[str, str]) -> int | None:
    """Return the number of a GPU, given its address in Spark; None if all GPUs are hidden.

    Unlike a rank, a worker cannot be limited to the task's GPU. The worker later serves other
    tasks with other GPUs, and CUDA reads ``CUDA_VISIBLE_DEVICES`` only once.
    """
    visible = visible_gpus(env) if VISIBLE_VARIABLE in env else None
    if visible == []:
        return None
    if address.isdigit():
        assigned_gpus([address], env)
        return int(address)
    # A UUID or a MIG instance. CUDA takes one MIG instance per process.
    if visible is None:
        env[VISIBLE_VARIABLE] = address
        return 0
    return visible.index(address) if address in visible else 0
