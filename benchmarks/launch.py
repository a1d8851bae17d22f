"""Seconds from the call to the first allreduce of two ranks, and to the results.

Compares the first launch of an application and later launches with this package (`SparkBackend`)
with `horovod.spark.run`, Spark's `TorchDistributor` (only torch), an empty barrier job, and a
process that only imports the same. Also reports the memory of the process from which ranks are
forked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import spark_and_folder
from benchmarks.figures import Record, compared, in_turns, options, show_result

# The imports below must follow benchmarks.common, which sets the environment of all benchmarks.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.spark
import psutil
from pyspark.sql import SparkSession

from benchmarks.train_by_hand import torch_distributor
from hvd_estimators.launch import SparkBackend

RANKS = 2
FIRST, NEXT, BASELINE = "first launch", "next launches", "horovod.spark.run"
DISTRIBUTOR, EMPTY = "TorchDistributor", "empty barrier job"
IMPORTS = "imports alone"


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


def empty_barrier_job(spark: SparkSession) -> None:
    """Run a barrier job in Python whose tasks do nothing."""

    def nothing(batches: Any) -> Any:
        for _ in batches:
            pass
        return iter(())

    assert not spark.range(0, RANKS, 1, RANKS).mapInArrow(nothing, "x int", barrier=True).collect()


def imports_alone(framework: str) -> float:
    """Return the seconds until a new process has imported what the functions import."""
    modules = f"import {framework}, horovod.{framework}"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", modules], check=True)
    return time.perf_counter() - started


def warm_memory() -> list[float]:
    """Return the MiB of each process that forks ranks; shared pages count proportionally."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "--warm" in command and '"name": "' in command[-1]:
            found.append(process.memory_full_info().pss / 2**20)
    return sorted(found)


def measure(spark: SparkSession, train: Callable[[], float], repeats: int) -> list[Record]:
    """Measure all launchers in turn, in one application; return the records of a framework."""
    backend = SparkBackend(RANKS)
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    reached: dict[str, list[float]] = {}

    def launch(name: str, run: Callable[[], list[float]]) -> float:
        started = time.time()
        reached.setdefault(name, []).append(max(run()) - started)
        return time.time() - started

    contenders: dict[str, Callable[[], Any]] = {
        EMPTY: lambda: empty_barrier_job(spark),
        NEXT: lambda: launch(NEXT, lambda: backend.run(train)),
        BASELINE: lambda: launch(
            BASELINE,
            lambda: horovod.spark.run(train, num_proc=RANKS, use_gloo=True, env=env, verbose=0),
        ),
    }
    framework = "torch" if train is train_torch else "tensorflow"
    if framework == "torch":
        # It returns the result of the first rank.
        contenders[DISTRIBUTOR] = lambda: launch(
            DISTRIBUTOR, lambda: [torch_distributor(RANKS).run(train_distributed)]
        )
    empty_barrier_job(spark)
    first = in_turns({FIRST: lambda: launch(FIRST, lambda: backend.run(train))}, 1)
    results = {**first, **in_turns(contenders, repeats)}
    reached.update(in_turns({IMPORTS: lambda: imports_alone(framework)}, repeats))
    return [
        *compared(f"{framework}, to the first allreduce", reached, "s", BASELINE, middle=True),
        *compared(f"{framework}, to the results", results, "s", BASELINE, middle=True),
        *compared(
            "memory of the process that ranks are forked from",
            {framework: warm_memory()[-1:]},
            "MiB",
        ),
    ]


def main() -> None:
    given = options(__doc__, repeats=3)
    with spark_and_folder(RANKS) as (spark, _):
        records = [
            record
            for train in (train_torch, train_tensorflow)
            for record in measure(spark, train, given.repeats)
        ]
    show_result("launch", vars(given), records)


if __name__ == "__main__":
    main()
