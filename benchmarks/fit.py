"""Time `fit` against horovod.spark's, and against hand-written loops.

One loop uses Horovod, and its rows exist as arrays. It runs in new processes, as ``horovodrun``
starts them, and in forks of a process that has imported torch. The other uses Spark's
`TorchDistributor`, and its time includes writing the DataFrame. Fits of a tenth of the rows
determine the fixed cost. The first fit of an application, which users of scripts wait for, is
measured in fresh processes, beside the first plain write of the DataFrame.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame

from benchmarks import train_by_hand
from benchmarks.common import (
    VALIDATION_SHARE,
    WIDTH,
    Net,
    collect,
    loss_on,
    need_baseline,
    regression_data,
    spark_and_folder,
    squared_error,
)
from benchmarks.figures import compared, in_turns, options, show_result
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.launch.warm.client import IDLE_VARIABLE
from hvd_estimators.torch import TorchEstimator

OURS, BASELINE = "hvd_estimators", "horovod.spark"
DISTRIBUTOR, BY_HAND, WARM = "TorchDistributor", "by hand", "by hand, warm processes"
WRITE = "plain write"
LEARNING_RATE = 1e-3
"""Learning rate of one rank; all multiply it by the number of ranks."""

SHARE_OF_FEW = 10
"""The smaller fit, which determines the fixed cost, has one of this many rows."""

WARM_UP_ROWS = 4000


def settings_of(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the params that both estimators get."""
    net = Net()
    return {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=LEARNING_RATE),
        "loss": squared_error,
        "feature_cols": ["features"],
        "label_cols": ["label"],
        "input_shapes": [[-1, WIDTH]],
        "validation": "is_validation",
        "batch_size": given.batch_size,
        "epochs": given.epochs,
        "random_seed": seed,
        "use_gpu": False,
        "verbose": 0,
    }


def fit_ours(frame: DataFrame, given: argparse.Namespace, seed: int, folder: str) -> Any:
    backend, store = SparkBackend(given.num_proc), Store.create(f"{folder}/store")
    estimator = TorchEstimator(backend=backend, store=store, **settings_of(given, seed))
    return estimator.fit(frame).getModel()


def fit_baseline(frame: DataFrame, given: argparse.Namespace, seed: int, folder: str) -> Any:
    from benchmarks import baseline

    env = {**os.environ, **baseline.QUIET}
    settings, store = settings_of(given, seed), baseline.make_store(folder)
    with Path(folder, "ranks.log").open("w+") as log:
        backend = baseline.SparkBackend(given.num_proc, env=env, verbose=0, stdout=log, stderr=log)
        try:
            model = baseline.TorchEstimator(backend=backend, store=store, **settings).fit(frame)
        except BaseException:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
    return model.getModel()


def fit_by_hand(arrays: Path, given: argparse.Namespace, seed: int, warm: bool = False) -> Net:
    backend = LocalBackend(given.num_proc, warm_start=warm)
    arguments = (arrays, given.epochs, given.batch_size, LEARNING_RATE, seed)
    return _with(backend.run(train_by_hand.train, args=arguments)[0])


def fit_distributed(frame: DataFrame, given: argparse.Namespace, seed: int, folder: str) -> Net:
    settings = (given.epochs, given.batch_size, LEARNING_RATE, seed)
    return _with(train_by_hand.distribute(frame, Path(folder), given.num_proc, settings))


def write_plain(frame: DataFrame, given: argparse.Namespace, seed: int, folder: str) -> None:
    features = vector_to_array("features", "float32").alias("features")
    frame.select(features, "label").write.parquet(f"file://{folder}/plain")


def _with(state: train_by_hand.State) -> Net:
    net = Net()
    net.load_state_dict(state)
    return net


class Contenders:
    """Fits of a DataFrame, and the losses of their networks on the validation rows."""

    def __init__(self, frame: DataFrame, given: argparse.Namespace, folder: Path) -> None:
        self.validation = collect(frame.where("is_validation"))
        train_by_hand.save(folder, "train", collect(frame.where("not is_validation")))
        train_by_hand.save(folder, "validation", self.validation)
        self.losses: dict[str, list[float]] = {}

        def in_folder(fit: Callable[..., Any]) -> Callable[[int], Any]:
            return lambda seed: fit(frame, given, seed, tempfile.mkdtemp(dir=folder))

        by_value = train_by_hand.sent_by_value()
        self.fits: Mapping[str, Callable[[int], Any]] = {
            OURS: by_value(in_folder(fit_ours)),
            # Its ranks need this package, see `benchmarks.common`, and import Spark anyway.
            BASELINE: in_folder(fit_baseline),
            DISTRIBUTOR: by_value(in_folder(fit_distributed)),
            BY_HAND: by_value(lambda seed: fit_by_hand(folder, given, seed)),
            WARM: by_value(lambda seed: fit_by_hand(folder, given, seed, warm=True)),
            WRITE: in_folder(write_plain),
        }

    def fit(self, name: str) -> float:
        """Return the seconds of a fit, each with another seed."""
        losses = self.losses.setdefault(name, [])
        started = time.perf_counter()
        net = self.fits[name](len(losses))
        taken = time.perf_counter() - started
        if net is not None:
            losses.append(loss_on(net, self.validation))
        return taken

    def measure(self, repeats: int) -> dict[str, list[float]]:
        return in_turns({name: functools.partial(self.fit, name) for name in self.fits}, repeats)


def fit_first(name: str) -> float:
    """Return the seconds of a contender's fit as the first one of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.fit", *sys.argv[1:], "--first", name]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(printed.splitlines()[-1]))


def fixed_and_per_step(
    whole: Mapping[str, Sequence[float]],
    few: Mapping[str, Sequence[float]],
    given: argparse.Namespace,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds that do not depend on the rows, and the milliseconds per step.

    They come from the line through two fits that differ only in their rows. The time per step
    includes writing and reading its rows.
    """
    steps, steps_of_few = (
        given.epochs * math.ceil(rows * (1 - VALIDATION_SHARE) / given.num_proc / given.batch_size)
        for rows in (given.rows, given.rows // SHARE_OF_FEW)
    )
    more = max(steps - steps_of_few, 1)
    step = {name: (min(whole[name]) - min(few[name])) / more for name in whole}
    fixed = {name: [min(whole[name]) - steps * each] for name, each in step.items()}
    return fixed, {name: [1000 * each] for name, each in step.items()}


def main() -> None:
    given = options(
        __doc__, rows=400_000, repeats=3, epochs=2, num_proc=2, batch_size=256, first=""
    )
    need_baseline()
    # Other contenders' turns take more than the minute after which warm processes end.
    os.environ[IDLE_VARIABLE] = "600"
    if given.first:
        with spark_and_folder(given.num_proc) as (spark, folder):
            frame = regression_data(spark, given.rows)
            print(json.dumps(Contenders(frame, given, folder).fit(given.first)), flush=True)
        return
    names = (OURS, BASELINE, DISTRIBUTOR, BY_HAND, WRITE)
    first = in_turns({n: functools.partial(fit_first, n) for n in names}, given.repeats)
    with spark_and_folder(given.num_proc) as (spark, folder):
        # Let the JVM compile the shared code before either estimator is measured.
        Contenders(regression_data(spark, WARM_UP_ROWS), given, folder).measure(1)
        few_rows = regression_data(spark, given.rows // SHARE_OF_FEW)
        few = Contenders(few_rows, given, folder).measure(given.repeats)
        contenders = Contenders(regression_data(spark, given.rows), given, folder)
        taken = contenders.measure(given.repeats)
    fixed, per_step = fixed_and_per_step(taken, few, given)
    records = [
        *compared("fit", taken, "s", BASELINE),
        *compared("first fit", first, "s", BASELINE, middle=True),
        *compared("fixed cost", fixed, "s", BASELINE),
        *compared("each step", per_step, "ms", BASELINE),
        *compared("validation loss", contenders.losses, "loss", BASELINE, middle=True),
    ]
    show_result("fit", {n: v for n, v in vars(given).items() if n != "first"}, records)


if __name__ == "__main__":
    main()
