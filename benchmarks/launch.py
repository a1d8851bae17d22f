"""Seconds from the call to the first allreduce of two ranks, and to the results.

Compares the first launch of an application and later launches with this package (`SparkBackend`)
with `horovod.spark.run`, Spark's `TorchDistributor` (only torch) and an empty barrier job. Also
reports the memory of the process from which ranks are forked.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import spark_session
from benchmarks.figures import Record, compared, seconds, show_result, show_table

# The imports below must follow benchmarks.common, which sets the environment of all benchmarks.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.spark
import psutil
from pyspark.sql import SparkSession

from benchmarks.train_by_hand import in_source, torch_distributor
from hvd_estimators.launch import SparkBackend

RANKS = 2
FIRST, NEXT, BASELINE = "first launch", "next launches", "horovod.spark.run"
DISTRIBUTOR, EMPTY = "TorchDistributor", "empty barrier job"
TITLES = {"to_allreduce": "to the first allreduce", "to_results": "to the results"}


def train_torch() -> float:
    """Return the time of the first allreduce, in seconds since the epoch."""
    import time

    import horovod.torch as hvd
    import torch

    hvd.init()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    reached = time.time()
    hvd.shutdown()
    return reached


def train_tensorflow() -> float:
    """Return the time of the first allreduce, in seconds since the epoch."""
    import time

    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    assert float(hvd.allreduce(tf.ones(1), op=hvd.Sum)[0]) == hvd.size()
    reached = time.time()
    hvd.shutdown()
    return reached


def train_distributed() -> float:
    """Return the time of the first allreduce of torch's collectives, with `TorchDistributor`."""
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert float(ones) == dist.get_world_size()
    reached = time.time()
    dist.destroy_process_group()
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
    """Return the MiB of each process that forks ranks; shared pages count proportionally."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "--warm" in command and '"name": "' in command[-1]:
            found.append(process.memory_full_info().pss / 2**20)
    return sorted(found)


def by_distributor() -> list[float]:
    """Launch with Spark's `TorchDistributor`, which returns the result of the first rank."""
    return [torch_distributor(RANKS).run(in_source(train_distributed))]


def measure(
    spark: SparkSession, train: Callable[[], float], repeats: int, distributor: bool
) -> dict[str, Any]:
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
    empty: list[float] = []
    taken: dict[str, list[Launch]] = {FIRST: [first], NEXT: [], BASELINE: []}
    if distributor:
        taken[DISTRIBUTOR] = []
    for _ in range(repeats):
        empty.append(seconds(lambda: empty_barrier_job(spark)))
        taken[NEXT].append(launch(lambda: backend.run(train)))
        taken[BASELINE].append(launch(baseline))
        if distributor:
            taken[DISTRIBUTOR].append(launch(by_distributor))
    return {
        "empty_job": empty,
        "to_allreduce": {name: [one.allreduce for one in each] for name, each in taken.items()},
        "to_results": {name: [one.results for one in each] for name, each in taken.items()},
        "warm_mib": warm_memory(),
    }


def records_of(framework: str, found: dict[str, Any]) -> list[Record]:
    """Return the records of a framework, and show them."""
    records: list[Record] = []
    for key in ("to_allreduce", "to_results"):
        measured = dict(found[key])
        if key == "to_results":
            measured[EMPTY] = found["empty_job"]
        table = f"{framework}, {TITLES[key]}"
        some = compared(table, measured, "s", BASELINE, middle=True)
        show_table(
            f"{table}, {RANKS} ranks",
            ["", "seconds", f"of {BASELINE}"],
            [[one.name, one.value, one.ratio] for one in some],
        )
        records += some
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="ignored: there is no data")
    parser.add_argument("--repeats", type=int, default=3, help="times, in turn; the median counts")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    records: list[Record] = []
    with spark_session(RANKS) as spark:
        for name, train in (("torch", train_torch), ("tensorflow", train_tensorflow)):
            figures[name] = measure(spark, train, options.repeats, distributor=name == "torch")
            records += records_of(name, figures[name])
    warm = {framework: found["warm_mib"][-1:] for framework, found in figures.items()}
    records += compared("memory of the process that ranks are forked from", warm, "MiB")
    show_result("launch", vars(options), figures, records)


if __name__ == "__main__":
    main()
