"""CPU threads and GPU of a process that predicts. Imports no framework and no PySpark."""

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
    """CPU threads and GPU that a predictor may use.

    Attributes
    ----------
    num_threads : int or None
        Number of compute threads; None for the framework's default.
    gpu : int or None
        Number of the GPU among the GPUs that the process sees; None for the CPU.
    named : str or None
        The user's name for the device; None if Spark assigned the device.
    """

    num_threads: int | None = None
    gpu: int | None = None
    named: str | None = None

    def among(self, visible: int) -> int | None:
        """Return the number of the GPU if a framework sees it; None for the CPU.

        A framework that sees no GPU, because it was built without CUDA, predicts on the CPU.

        Parameters
        ----------
        visible : int
            Number of GPUs that the framework sees.

        Raises
        ------
        GpuError
            If the framework sees GPUs, but not this one.
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
"""The CPU, with the framework's default number of threads."""


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
