"""CPU cores and GPU of a process that predicts. Imports no framework and no PySpark."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from hvd_estimators.exceptions import GpuError
from hvd_estimators.launch.gpus import VISIBLE_VARIABLE, assigned_gpus, visible_gpus

__all__ = ["FRAMEWORKS_CHOICE", "Resources", "task_resources"]

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
