"""Seconds from the call to the first allreduce of two ranks, and to the results.

Compares this package's first launch of an application and the next ones (`SparkBackend`) with
`horovod.spark.run`, and with a barrier job that does nothing. Also tells what the process holds
that ranks are forked from.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import spark_session
from benchmarks.figures import seconds, show_result, show_table

# After Spark's settings, which are those of all benchmarks.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.spark
import psutil
from pyspark.sql import SparkSession

from hvd_estimators.launch import SparkBackend

RANKS = 2


def train_torch() -> float:
    """Return when the first allreduce was done, in seconds since the epoch."""
    import time

    import horovod.torch as hvd
    import torch

    hvd.init()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    reached = time.time()
    hvd.shutdown()
    return reached


def train_tensorflow() -> float:
    """Return when the first allreduce was done, in seconds since the epoch."""
    import time

    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    assert float(hvd.allreduce(tf.ones(1), op=hvd.Sum)[0]) == hvd.size()
    reached = time.time()
    hvd.shutdown()
    return reached


@dataclass(frozen=True)
class Launch:
    """Seconds from the call to the first allreduce on the slowest rank, and to the results."""

    allreduce: float
    results: float


def launch(run: Callable[[], list[float]]) -> Launch:
    """Measure one launch."""
    started = time.time()
    reached = run()
    return Launch(max(reached) - started, time.time() - started)


def empty_barrier_job(spark: SparkSession) -> None:
    """Run a barrier job in Python whose tasks do nothing."""

    def nothing(batches: Any) -> Any:
        for _ in batches:
            pass
        return iter(())

    assert not spark.range(0, RANKS, 1, RANKS).mapInArrow(nothing, "x int", barrier=True).collect()


def warm_memory() -> list[float]:
    """Return the MiB of each process that ranks are forked from; a shared page counts in part."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "--warm" in command and '"name": "' in command[-1]:
            found.append(process.memory_full_info().pss / 2**20)
    return sorted(found)


def middle(launches: list[Launch]) -> Launch:
    """Return the median of each figure."""
    return Launch(
        statistics.median(one.allreduce for one in launches),
        statistics.median(one.results for one in launches),
    )


def measure(spark: SparkSession, train: Callable[[], float], repeats: int) -> dict[str, Any]:
    """Measure all launchers in turn, in one application."""
    backend = SparkBackend(RANKS)
    baseline_env = {**os.environ, "PYTHONWARNINGS": "ignore"}

    def baseline() -> list[float]:
        found: list[float] = horovod.spark.run(
            train, num_proc=RANKS, use_gloo=True, env=baseline_env, verbose=0
        )
        return found

    empty_barrier_job(spark)
    first = launch(lambda: backend.run(train))
    empty, next_ones, baselines = [], [], []
    for _ in range(repeats):
        empty.append(seconds(lambda: empty_barrier_job(spark)))
        next_ones.append(launch(lambda: backend.run(train)))
        baselines.append(launch(baseline))
    job = statistics.median(empty)
    horovods, later = middle(baselines), middle(next_ones)
    return {
        "empty_job": job,
        "first": asdict(first),
        "next": asdict(later),
        "horovod_spark": asdict(horovods),
        "first_over_horovod_spark": first.allreduce / horovods.allreduce,
        "next_over_horovod_spark": later.allreduce / horovods.allreduce,
        "next_after_empty_job": later.allreduce - job,
        "warm_mib": warm_memory(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="ignored: there is no data")
    parser.add_argument("--repeats", type=int, default=3, help="times, in turn; the median counts")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with spark_session(RANKS) as spark:
        for name, train in (("torch", train_torch), ("tensorflow", train_tensorflow)):
            found = figures[name] = measure(spark, train, options.repeats)
            rows = [
                [title, found[key]["allreduce"], found[key]["results"]]
                for title, key in (
                    ("first launch", "first"),
                    ("next launches", "next"),
                    ("horovod.spark.run", "horovod_spark"),
                )
            ]
            rows.append(["empty barrier job", "", found["empty_job"]])
            show_table(f"{name}, {RANKS} ranks, seconds", ["", "to allreduce", "to results"], rows)
            print(
                f"first / horovod.spark.run {found['first_over_horovod_spark']:.2f}, "
                f"next / horovod.spark.run {found['next_over_horovod_spark']:.2f}, "
                f"next - empty job {found['next_after_empty_job']:.2f} s, "
                f"warm processes {', '.join(f'{m:.0f}' for m in found['warm_mib'])} MiB"
            )
    show_result("launch", vars(options), figures)


if __name__ == "__main__":
    main()
