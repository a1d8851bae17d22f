"""Two executor processes with (pretended) GPUs: pins, the store, and progress across processes."""

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


def test_each_rank_sees_its_own_gpu_and_those_of_an_executor_follow_each_other(
    gpu_cluster: Application,
) -> None:
    pins = gpu_cluster.run(pinned_gpus, 4)

    assert sorted([set(pins[:2]), set(pins[2:])], key=max) == [set(GPUS[0]), set(GPUS[1])]


def test_a_variable_lets_the_local_rank_choose_the_gpu(gpu_cluster: Application) -> None:
    assert gpu_cluster.run(lambda: pinned_gpus(2, HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX="1")) == [
        "0",
        "1",
    ]


def two_jobs_at_once() -> list[list[tuple[set[str], int, int]]]:
    """Return the GPUs, the process and the rendezvous' port of each rank, job by job."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    from hvd_estimators import run

    def seen(folder: str, job: int) -> tuple[set[str], int, int]:
        import time

        import horovod.torch as hvd

        hvd.init()
        Path(folder, f"{job}.{hvd.rank()}").touch()
        deadline = time.monotonic() + 120
        while len(list(Path(folder).iterdir())) < 4:  # those of both jobs are here
            assert time.monotonic() < deadline
            time.sleep(0.05)
        gpus = set(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        return gpus, os.getpid(), int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: run(seen, (folder, job), num_proc=2), range(2)))


def test_jobs_at_the_same_time_share_neither_gpus_nor_ports(gpu_cluster: Application) -> None:
    jobs = gpu_cluster.run(two_jobs_at_once)

    ranks = [rank for job in jobs for rank in job]
    assert sorted(gpu for gpus, _, _ in ranks for gpu in gpus) == sorted([*GPUS[0], *GPUS[1]])
    assert len({process for _, process, _ in ranks}) == 4
    first, second = ({port for _, _, port in job} for job in jobs)
    assert first.isdisjoint(second)


def profiled() -> dict[str, Any]:
    """Ask for more of each task than the application's settings do."""
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
    with pytest.raises(SlotsError, match=r"gpus_per_task=3.*Ask for less, or .*resource\.gpu"):
        run(devices, num_proc=1, gpus_per_task=3)
    of_executors = ResourceProfileBuilder().require(executors).require(tasks).build
    with pytest.raises(SlotsError, match=r"tasks only.* need dynamic allocation"):
        run(devices, num_proc=2, resource_profile=of_executors)
    return found


def test_ranks_ask_for_other_resources_than_the_applications_settings(
    gpu_cluster: Application,
) -> None:
    found = gpu_cluster.run(profiled)

    # Two GPUs for each rank, all of its executor's.
    assert sorted((sorted(seen) for seen, _, _ in found["gpus"]), key=max) == sorted(
        map(sorted, GPUS), key=max
    )
    # Both cores of an executor for each: two ranks, where the settings allow four.
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
        # On ranks GPUs are hidden.
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


def test_executors_share_the_store_and_report_progress(
    gpu_cluster: Application, tmp_path: Path
) -> None:
    before = gpu_cluster.log.stat().st_size

    losses = gpu_cluster.run(lambda: fit(str(tmp_path), gpus_per_task=2))

    assert losses[1] < losses[0]
    shown = gpu_cluster.log.read_bytes()[before:].decode()
    assert "Epoch 2/2:" in shown
    assert "rows/s, loss=" in shown


def test_executors_that_do_not_see_the_store_or_are_too_few_are_told_of(
    gpu_cluster: Application, tmp_path: Path
) -> None:
    # Each process sees a folder of its own here, as machines do that share nothing.
    with pytest.raises(StoreError, match="do not see"):
        gpu_cluster.run(lambda: fit(str(tmp_path), store="/proc/self/cwd/apart"))
    with pytest.raises(SlotsError, match="has 4"):
        gpu_cluster.run(lambda: fit(str(tmp_path), num_proc=5))


def predicted_where() -> tuple[set[tuple[int, int]], set[float]]:
    """Return the GPU and the cores of each task, and with how many threads a model predicts."""
    import torch
    from pyspark import TaskContext
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from hvd_estimators.inference.worker import task_resources
    from hvd_estimators.torch import TorchModel

    class Threads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, torch.get_num_threads())

    def resources(rows: object) -> list[tuple[int, int]]:
        found = task_resources(TaskContext.get())
        return [(found.gpu or -1, found.num_threads or -1)]

    spark = SparkSession.active()
    there = set(spark.sparkContext.parallelize(range(8), 8).mapPartitions(resources).collect())
    model = TorchModel(
        model=Threads(), feature_columns=["x"], label_columns=["y"], input_shapes=[[]]
    )
    frame = spark.range(8).select(F.col("id").cast("double").alias("x"))
    rows = model.transform(frame.repartition(4)).collect()
    return there, {row["y__output"] for row in rows}


def test_transform_takes_the_tasks_gpus_and_cores_and_without_cuda_the_cpu(
    gpu_cluster: Application,
) -> None:
    there, threads = gpu_cluster.run(predicted_where)

    assert {gpu for gpu, _ in there} <= {int(gpu) for addresses in GPUS for gpu in addresses}
    assert {cores for _, cores in there} == {1}
    assert threads == {1.0}
