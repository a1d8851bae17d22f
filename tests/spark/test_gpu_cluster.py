"""GPU pins, store access and progress on two executors with pretended GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from servers.driver import Application
from servers.gpus import GPUS

from hvd_estimators.exceptions import SlotsError, StoreError

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.once]


def pinned_gpus(num_proc: int, **env: str) -> list[str]:
    from hvd_estimators.launch.spark_backend import SparkBackend

    def pinned_gpu() -> str:
        from hvd_estimators import get_available_devices

        variable = os.environ["CUDA_VISIBLE_DEVICES"]
        if "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX" not in os.environ:
            assert get_available_devices() == variable.split(",")
        return variable

    return SparkBackend(num_proc, env=env or None).run(pinned_gpu)


def test_a_variable_selects_gpus_by_local_rank(gpu_cluster: Application) -> None:
    assert gpu_cluster.run(lambda: pinned_gpus(2, HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX="1")) == [
        "0",
        "1",
    ]


def two_jobs_at_once() -> list[list[tuple[set[str], int, int]]]:
    """Return each rank's GPUs, process and rendezvous port, job by job."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    from hvd_estimators import run

    def seen(folder: str, job: int) -> tuple[set[str], int, int]:
        import time

        import horovod.torch as hvd

        hvd.init()
        Path(folder, f"{job}.{hvd.rank()}").touch()
        deadline = time.monotonic() + 120
        while len(list(Path(folder).iterdir())) < 4:  # the ranks of both jobs run
            assert time.monotonic() < deadline
            time.sleep(0.05)
        gpus = set(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        return gpus, os.getpid(), int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: run(seen, (folder, job), num_proc=2), range(2)))


def test_concurrent_jobs_share_neither_gpus_nor_ports(gpu_cluster: Application) -> None:
    jobs = gpu_cluster.run(two_jobs_at_once)

    ranks = [rank for job in jobs for rank in job]
    assert sorted(gpu for gpus, _, _ in ranks for gpu in gpus) == sorted([*GPUS[0], *GPUS[1]])
    assert len({process for _, process, _ in ranks}) == 4
    first, second = ({port for _, _, port in job} for job in jobs)
    assert first.isdisjoint(second)


def profiled() -> dict[str, Any]:
    """Request more resources per task than the application's settings."""
    from pyspark.resource import (
        ExecutorResourceRequests,
        ResourceProfileBuilder,
        TaskResourceRequests,
    )

    from hvd_estimators import get_available_devices, run

    def devices() -> tuple[list[str], list[str], int]:
        import horovod.torch as hvd

        hvd.init()
        return os.environ["CUDA_VISIBLE_DEVICES"].split(","), get_available_devices(), hvd.size()

    tasks = TaskResourceRequests().cpus(2).resource("gpu", 1)
    executors = ExecutorResourceRequests().cores(2).resource("gpu", 2)
    of_tasks = ResourceProfileBuilder().require(tasks).build
    found: dict[str, Any] = {
        "gpus": run(devices, num_proc=2, gpus_per_task=2),
        "profile": run(devices, resource_profile=of_tasks),
    }
    with pytest.raises(SlotsError, match=r"has 2 with gpus_per_task=2\. Set num_proc to 2"):
        run(devices, num_proc=3, gpus_per_task=2)
    with pytest.raises(SlotsError, match=r"gpus_per_task=3.*ask for less, or .*resource\.gpu"):
        run(devices, num_proc=1, gpus_per_task=3)
    of_executors = ResourceProfileBuilder().require(executors).require(tasks).build
    with pytest.raises(SlotsError, match=r"tasks only.* need dynamic allocation"):
        run(devices, num_proc=2, resource_profile=of_executors)
    return found


def test_ranks_can_request_more_resources_than_the_settings(gpu_cluster: Application) -> None:
    found = gpu_cluster.run(profiled)

    # Two GPUs per rank: all of its executor.
    assert sorted((sorted(seen) for seen, _, _ in found["gpus"]), key=max) == sorted(
        map(sorted, GPUS), key=max
    )
    # Both cores of an executor per rank: two ranks, although the settings allow four.
    assert [size for _, _, size in found["profile"]] == [2, 2]
    for seen, addresses, _ in [*found["gpus"], *found["profile"]]:
        assert seen == addresses


def fit(folder: str, **params: Any) -> list[float]:
    import torch
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from hvd_estimators import Store
    from hvd_estimators.torch import TorchEstimator

    spark = SparkSession.active()
    frame = spark.range(64).select(F.rand(1).alias("x")).withColumn("y", F.col("x") * 2)
    net = torch.nn.Linear(1, 1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # GPUs are hidden from the ranks.
        assert "HOROVOD_RANK" not in os.environ or os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
        return torch.nn.functional.mse_loss(output, target)

    given = {"num_proc": 2, "store": Store.create(f"{folder}/store"), **params}
    if isinstance(given["store"], str):
        given["store"] = Store.create(given["store"])
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=loss,
        use_gpu=False,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        epochs=2,
        **given,
    )
    before = os.getcwd()
    os.chdir(folder)
    try:
        return [record["train"]["loss"] for record in estimator.fit(frame).getHistory()]
    finally:
        os.chdir(before)


def test_an_unshared_store_and_too_few_executors_are_reported(
    gpu_cluster: Application, tmp_path: Path
) -> None:
    # Each process has a different folder there, like machines that share nothing.
    with pytest.raises(StoreError, match="do not see"):
        gpu_cluster.run(lambda: fit(str(tmp_path), store="/proc/self/cwd/apart"))
    with pytest.raises(SlotsError, match="has 4"):
        gpu_cluster.run(lambda: fit(str(tmp_path), num_proc=5))
