"""Threads and GPU of a Python worker's predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.exceptions import GpuError
from hvd_estimators.inference.batch import Resources
from hvd_estimators.inference.worker import task_resources


def task(cpus: int = 1, *addresses: str) -> Any:
    """Return a stub of a TaskContext."""
    gpus = {"gpu": SimpleNamespace(addresses=list(addresses))} if addresses else {}
    return SimpleNamespace(cpus=lambda: cpus, resources=lambda: gpus)


@pytest.mark.parametrize(
    ("variable", "given", "threads"),
    [
        (None, task(3), 3),
        ("2", task(3), 2),  # spark.executorEnv.OMP_NUM_THREADS
        ("many", task(3), 3),
        (None, None, None),
        ("2", None, 2),
    ],
)
def test_the_number_of_threads_is_that_of_the_tasks_cores(
    variable: Any, given: Any, threads: Any
) -> None:
    env = {"OMP_NUM_THREADS": variable} if variable else {}
    assert task_resources(given, env) == Resources(threads)


@pytest.mark.parametrize(
    ("visible", "address", "number"),
    [
        (None, "2", 2),
        ("3,5", "1", 1),  # addresses are indices of the executor's visible GPUs
        ("-1", "0", None),
        ("", "0", None),
        ("GPU-aa,GPU-bb", "GPU-bb", 1),
        ("MIG-aa", "MIG-bb", 0),  # set by an earlier task; a process has one
    ],
)
def test_the_gpu_follows_sparks_address(visible: Any, address: str, number: Any) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    before = dict(env)
    assert task_resources(task(1, address), env).gpu == number
    assert env == before


def test_a_gpu_named_by_uuid_is_the_only_visible_one() -> None:
    env: dict[str, str] = {}
    assert task_resources(task(1, "GPU-aa"), env).gpu == 0
    assert env == {"CUDA_VISIBLE_DEVICES": "GPU-aa"}


def test_invisible_gpus_are_an_error_unless_no_gpu_is_visible() -> None:
    with pytest.raises(GpuError, match="executor sees 2"):
        task_resources(task(1, "2"), {"CUDA_VISIBLE_DEVICES": "3,5"})
    with pytest.raises(GpuError, match=r"GPU 2 to this task.* sees 2"):
        Resources(gpu=2).among(2)
    with pytest.raises(GpuError, match=r"device: found 'cuda:2', .* sees 2\. .* below 2"):
        Resources(gpu=2, named="cuda:2").among(2)
    assert Resources(gpu=1).among(2) == 1
    assert Resources(gpu=1).among(0) is None
    assert Resources().among(2) is None
