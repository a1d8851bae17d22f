"""Predictors in an executor's Python worker: resources, and a cache across tasks.

Imports no framework and no PySpark.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from zipimport import zipimporter

import cloudpickle

from hvd_estimators.exceptions import GpuError
from hvd_estimators.inference.batch import Predictor
from hvd_estimators.inference.broadcast import Hashed, Payload, Sent, received
from hvd_estimators.inference.errors import naming_missing_modules
from hvd_estimators.launch.gpus import VISIBLE_VARIABLE, assigned_gpus, visible_gpus

__all__ = [
    "FRAMEWORKS_CHOICE",
    "Payload",
    "Predictor",
    "Resources",
    "cached_predictor",
    "forget_archives",
    "predictor_key",
    "task_resources",
]

_OF_JAVA = ".jar"


def forget_archives(finders: MutableMapping[str, Any] | None = None) -> None:
    """Let the next task's worker read fewer archives again.

    PySpark before 4.1 calls ``importlib.invalidate_caches`` at the beginning of each task, and of
    each folder in an archive that modules were imported from (a dozen in ``pyspark.zip``) Python
    then reads the archive's whole list of files: 60 ms, where a task's rows may take 20. Python
    makes the finders again where it needs them, from the list that the archive's own finder keeps
    up to date. Java's archives, of which Spark has one in ``PYTHONPATH``, are not looked at again
    before something is imported: a running JVM's do not change.

    Parameters
    ----------
    finders : mapping, optional
        Path to finder. Default: those of this process, ``sys.path_importer_cache``.
    """
    finders = sys.path_importer_cache if finders is None else finders
    for path, finder in list(finders.items()):
        if not isinstance(finder, zipimporter):
            continue
        is_folder = bool(finder.prefix) and finder.archive in finders
        if is_folder or finder.archive.endswith(_OF_JAVA):
            del finders[path]


_THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Resources:
    """What a predictor may use.

    Attributes
    ----------
    num_threads : int or None
        Threads to compute with; None for as many as the framework takes by itself.
    gpu : int or None
        The GPU, as its number among those that the process sees; None for the CPU.
    named : str or None
        What a user called it; None where Spark assigned it.
    """

    num_threads: int | None = None
    gpu: int | None = None
    named: str | None = None

    def among(self, visible: int) -> int | None:
        """Return the GPU, of so many that a framework sees; None for the CPU.

        A framework that sees none, as it was built without CUDA, predicts on the CPU.

        Raises
        ------
        GpuError
            If it sees some, and not this one.
        """
        if self.gpu is None or not visible:
            return None
        if self.gpu >= visible and self.named is not None:
            raise GpuError(
                f"device: found {self.named!r}, and the framework sees {visible}. Set a number "
                f"below {visible}."
            )
        if self.gpu >= visible:
            raise GpuError(
                f"Spark assigned the GPU {self.gpu} to this task, and its Python worker sees "
                f"{visible}. Let spark.executor.resource.gpu.discoveryScript print the numbers of "
                "GPUs that executors see."
            )
        return self.gpu


FRAMEWORKS_CHOICE = Resources()


"""The CPU, and as many threads as the framework takes by itself."""


def task_resources(task: Any, env: MutableMapping[str, str] = os.environ) -> Resources:
    """Return what a Spark task has. Runs in its Python worker.

    Parameters
    ----------
    task : TaskContext or None
        The task; None outside of one.
    env : mapping
        The worker's environment. Spark sets ``OMP_NUM_THREADS`` there to ``spark.task.cpus``,
        unless ``spark.executorEnv.OMP_NUM_THREADS`` says something else. ``CUDA_VISIBLE_DEVICES``
        is set to a GPU that has no number, if it is not set.

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
    """Return the number of a GPU, given Spark's address of it; None if the GPUs are hidden.

    What a worker sees cannot be the task's GPU alone, as for ranks: it serves other tasks
    afterwards, with other GPUs, and CUDA reads its variable once.
    """
    visible = visible_gpus(env) if VISIBLE_VARIABLE in env else None
    if visible == []:
        return None
    if address.isdigit():
        assigned_gpus([address], env)
        return int(address)
    # A UUID, or a MIG instance, of which CUDA takes one per process.
    if visible is None:
        env[VISIBLE_VARIABLE] = address
        return 0
    return visible.index(address) if address in visible else 0


def predictor_key(hashed: Hashed, load: Callable[[Payload], Predictor]) -> str:
    """Return what tells a predictor from others: a digest of all that it is made of.

    Of one document, models with other settings make other predictors: ``load`` is pickled with all
    that it refers to.
    """
    return hashlib.sha256(hashed.digest.encode() + cloudpickle.dumps(load)).hexdigest()


# Python workers serve many tasks: a model is unpickled once in each of them.
_predictors: dict[tuple[str, Resources], Predictor] = {}


def cached_predictor(
    key: str,
    model: Sent,
    load: Callable[..., Predictor],
    resources: Resources = FRAMEWORKS_CHOICE,
) -> Predictor:
    """Return the predictor with a key, made now where the worker has another one or none.

    Parameters
    ----------
    key : str
        See `predictor_key`.
    model : Sent
        The document.
    load : callable
        Makes a predictor of the document, or of this and the resources.
    resources : Resources
        What the task has. With others a predictor is another one.
    """
    forget_archives()
    found = _predictors.get((key, resources))
    if found is not None:
        return found
    gc.unfreeze()
    _predictors.clear()
    with received(model) as document, naming_missing_modules():
        made = load(document, resources) if _takes_resources(load) else load(document)
        _predictors[key, resources] = made
    forget_archives()
    # PySpark collects garbage after each task, and looks at all objects of an imported framework
    # each time, for 100 ms and more. What lives as long as the predictor is set aside until another
    # one comes.
    gc.collect()
    gc.freeze()
    return made


def _takes_resources(load: Callable[..., Predictor]) -> bool:
    """Return whether a function takes them; that of a user's own kind of model may not."""
    try:
        inspect.signature(load).bind(b"", FRAMEWORKS_CHOICE)
    except TypeError:
        return False
    return True
