"""Spark jobs: job groups, cancelling, waiting for slots, and lost Python workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from estimators import line_estimator
from processes import wait_until
from pyspark import InheritableThread
from pyspark.sql import functions as F

from hvd_estimators.exceptions import JobCancelledError, WorkerFailedError
from hvd_estimators.launch.rank.graceful_stop import GRACE_VARIABLE
from hvd_estimators.launch.spark_backend import SparkBackend

pytestmark = pytest.mark.spark

MINE = {
    "spark.jobGroup.id": "mine",
    "spark.job.description": "my jobs",
    "spark.job.interruptOnCancel": "false",
    "spark.job.tags": "my-tag",
    "spark.scheduler.pool": "my-pool",
    "of.my.own": "1",
}


@pytest.fixture
def my_jobs(spark: Any) -> Iterator[Callable[[], dict[str, str | None]]]:
    """Give this thread a job group and other properties; return a function that reads them."""
    context = spark.sparkContext
    before = {name: context.getLocalProperty(name) for name in MINE}
    for name, value in MINE.items():
        context.setLocalProperty(name, value)
    yield lambda: {name: context.getLocalProperty(name) for name in MINE}
    for name, value in before.items():
        context.setLocalProperty(name, value)


def descriptions(spark: Any, group: str) -> list[str]:
    """Return what Spark's UI shows for the jobs of a group, oldest first."""
    context = spark.sparkContext
    context._jsc.sc().listenerBus().waitUntilEmpty()
    jobs = sorted(context.statusTracker().getJobIdsForGroup(group))
    return [context._jsc.sc().statusStore().job(job).description().get() for job in jobs]


def test_jobs_say_what_they_do(spark: Any, store: Any) -> None:
    frame = spark.range(50).select((F.col("id") / 7).alias("x"), (F.col("id") / 3).alias("y"))
    estimator = line_estimator(store, num_proc=2, run_id="told")
    context = spark.sparkContext
    context.setLocalProperty("spark.jobGroup.id", "told")
    try:
        estimator.fit(frame)
        found = list(dict.fromkeys(descriptions(spark, "told")))
        found = [text for text in found if text != "Imports for ranks"]
        assert found == ["Write training data of run told", "Train run told on 2 ranks: 50 rows"]
        # The user's own description stays.
        context.setLocalProperty("spark.jobGroup.id", "mine too")
        context.setLocalProperty("spark.job.description", "my jobs")
        estimator.copy({"run_id": "other"}).fit(frame)
        assert set(descriptions(spark, "mine too")) == {"my jobs"}
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description"):
            context.setLocalProperty(name, None)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def start_and_wait(marker: str) -> None:
    """Write this process's ID to a file, and sleep."""
    partial = Path(f"{marker}.{os.environ['HOROVOD_RANK']}.partial")
    partial.write_text(str(os.getpid()))
    partial.rename(partial.with_suffix(".rank"))
    time.sleep(300)


def ranks(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("*.rank")]


def estimator_that_waits(store: Any, marker: str) -> Any:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if "HOROVOD_RANK" in os.environ:
            start_and_wait(marker)
        return torch.nn.functional.mse_loss(output, label)

    # These ranks never finish a step.
    backend = SparkBackend(2, env={GRACE_VARIABLE: "1"}, verbose=0)
    return line_estimator(store, backend=backend, loss=loss)


@pytest.mark.parametrize("how", ["run", "fit", "prepare"])
def test_cancelling_the_callers_group_ends_the_ranks(
    spark: Any, store: Any, tmp_path: Path, my_jobs: Any, how: str
) -> None:
    """Run in a thread that inherits the caller's properties, like a CrossValidator's threads."""
    context = spark.sparkContext
    marker = str(tmp_path / "started")
    frame = spark.range(8).select(F.col("id").cast("double").alias("x"), F.lit(1.0).alias("y"))

    def slowly(batches: Any) -> Any:
        for batch in batches:
            # Two tasks write, and no reader may see an empty file.
            partial = Path(f"{marker}.{os.getpid()}.partial")
            partial.write_text(str(os.getpid()))
            partial.rename(f"{marker}.0.rank")
            time.sleep(300)
            yield batch

    calls = {
        "run": lambda: SparkBackend(2).run(start_and_wait, (marker,)),
        "fit": lambda: estimator_that_waits(store, marker).fit(frame),
        "prepare": lambda: estimator_that_waits(store, marker).fit(
            frame.mapInArrow(slowly, "x double, y double")
        ),
    }
    raised: list[BaseException] = []
    properties: list[dict[str, Any]] = []

    def call() -> None:
        try:
            calls[how]()
        except BaseException as error:
            raised.append(error)
        properties.append(my_jobs())

    thread = InheritableThread(target=call)
    thread.start()
    try:
        wait_until(lambda: len(ranks(tmp_path)) == (1 if how == "prepare" else 2) or raised)
        started = ranks(tmp_path)
    finally:
        context.cancelJobGroup("mine")
    thread.join(60)

    (error,) = raised
    assert isinstance(error, JobCancelledError)
    assert "cancelled job group mine" in str(error)
    assert error.__cause__ is not None
    assert properties == [MINE]
    wait_until(lambda: not any(map(alive, started)))


def test_a_run_restores_the_callers_properties(spark: Any, my_jobs: Any) -> None:
    context = spark.sparkContext
    assert SparkBackend(1).run(lambda: 5) == [5]
    assert my_jobs() == MINE
    for name in MINE:
        context.setLocalProperty(name, None)
    assert SparkBackend(1).run(lambda: 5) == [5]
    assert my_jobs() == dict.fromkeys(MINE)


def test_waiting_for_slots_does_not_count_towards_the_start_timeout(
    spark: Any, tmp_path: Path
) -> None:
    """Run two jobs of two ranks on three slots; the second waits longer than its timeout."""
    release = tmp_path / "release"

    def wait() -> str:
        Path(tmp_path, "started").touch()
        while not release.exists():
            time.sleep(0.05)
        return "first"

    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(SparkBackend(2).run(wait)))
    first.start()
    try:
        wait_until((tmp_path / "started").exists)
    finally:
        threading.Timer(3, release.touch).start()

    second = SparkBackend(2, start_timeout=1).run(lambda: "second")

    first.join(60)
    assert release.exists()
    assert (results, second) == ([["first"] * 2], ["second"] * 2)


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_killed_python_worker_is_reported_with_its_host(
    spark: Any, tmp_path: Path, warm_start: bool
) -> None:
    def kill(marker: str) -> None:
        import os
        import signal

        import psutil

        Path(f"{marker}.{os.environ['HOROVOD_RANK']}.rank").write_text(str(os.getpid()))
        if os.environ["HOROVOD_RANK"] == "1":
            # Horovod's rendezvous of this rank is in its task.
            port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
            (task,) = [
                found.pid
                for found in psutil.net_connections("tcp")
                if found.status == psutil.CONN_LISTEN and found.laddr.port == port
            ]
            os.kill(task, signal.SIGKILL)
        time.sleep(300)

    started = time.monotonic()
    with pytest.raises(WorkerFailedError, match="its Python process, has ended") as caught:
        SparkBackend(2, warm_start=warm_start).run(kill, (str(tmp_path / "marker"),))
    assert time.monotonic() - started < 60
    wait_until(lambda: not any(map(alive, ranks(tmp_path))))
    assert caught.value.host
    assert f"on {caught.value.host} (executor driver)" in str(caught.value)
    assert "Python worker exited unexpectedly" in str(caught.value)
    assert "scala:" not in str(caught.value)
    assert caught.value.__cause__ is not None
