"""Time `fit` against horovod.spark's, and against hand-written loops.

One loop uses Horovod, and its rows exist as arrays. The other uses Spark's `TorchDistributor`, and
its time includes writing the DataFrame. Fits of a tenth of the rows determine the fixed cost. The
first fit of an application, which users of scripts wait for, is measured in fresh processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from pyspark.sql import DataFrame

from benchmarks import train_by_hand
from benchmarks.common import (
    WIDTH,
    Arrays,
    Net,
    collect,
    need_baseline,
    regression_data,
    spark_session,
    squared_error,
)
from benchmarks.figures import parser, seconds
from benchmarks.fit_report import (
    BASELINE,
    BY_HAND,
    DISTRIBUTOR,
    OURS,
    SHARE_OF_FEW,
    Fitted,
    report,
)
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.torch import TorchEstimator

WARM_UP_ROWS = 4000


class Moments:
    """A callback that records the times at which a rank started and finished training."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_begin(self, **_: Any) -> None:
        self._note("begin")

    def on_train_end(self, **_: Any) -> None:
        self._note("end")

    def read(self, moment: str) -> list[float]:
        return [float(path.read_text()) for path in Path(self.folder).glob(f"{moment}.*")]

    def _note(self, moment: str) -> None:
        Path(self.folder, f"{moment}.{os.getpid()}").write_text(str(time.time()))


def timed(backend_class: Any, num_proc: int, **kwargs: Any) -> Any:
    """Return a backend that records the times of the call and the return of its `run`."""

    class TimedBackend(backend_class):  # type: ignore[misc]
        def run(self, *args: Any, **kwargs: Any) -> Any:
            self.called = time.time()
            try:
                return super().run(*args, **kwargs)
            finally:
                self.returned = time.time()

    return TimedBackend(num_proc, **kwargs)


@contextlib.contextmanager
def kept_output(path: Path) -> Iterator[IO[str]]:
    """Yield a file for the ranks' output, which is shown only if the block fails."""
    with path.open("w", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            file.flush()
            print(path.read_text(encoding="utf-8"), file=sys.stderr)
            raise


def settings_of(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the params that both estimators get."""
    net = Net()
    return {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=options.learning_rate),
        "loss": squared_error,
        "feature_cols": ["features"],
        "label_cols": ["label"],
        "input_shapes": [[-1, WIDTH]],
        "validation": "is_validation",
        "batch_size": options.batch_size,
        "epochs": options.epochs,
        "random_seed": seed,
        "use_gpu": False,
        "verbose": 0,
    }


def fit_ours(frame: DataFrame, options: argparse.Namespace, seed: int, folder: str) -> Fitted:
    backend = timed(SparkBackend, options.num_proc)
    moments = Moments(folder)
    estimator = TorchEstimator(
        backend=backend,
        store=Store.create(f"{folder}/store"),
        callbacks=[moments],
        **settings_of(options, seed),
    )
    started = time.time()
    model = estimator.fit(frame)
    ended = time.time()
    begin, end = min(moments.read("begin")), max(moments.read("end"))
    parts = {
        "prepare": backend.called - started,
        "launch": begin - backend.called,
        "training": end - begin,
        "finish": ended - end,
    }
    return Fitted(model.getModel(), ended - started, parts)


def fit_baseline(frame: DataFrame, options: argparse.Namespace, seed: int, folder: str) -> Fitted:
    from benchmarks import baseline

    store = baseline.make_store(folder)
    with kept_output(Path(folder) / "ranks.log") as log:
        backend = timed(
            baseline.SparkBackend,
            options.num_proc,
            env={**os.environ, **baseline.QUIET},
            verbose=0,
            stdout=log,
            stderr=log,
        )
        estimator = baseline.TorchEstimator(
            backend=backend, store=store, **settings_of(options, seed)
        )
        started = time.time()
        model = estimator.fit(frame)
        ended = time.time()
    parts = {
        "prepare": backend.called - started,
        "launch and training": backend.returned - backend.called,
        "finish": ended - backend.returned,
    }
    return Fitted(model.getModel(), ended - started, parts)


def fit_by_hand(arrays: Path, options: argparse.Namespace, seed: int) -> Fitted:
    arguments = (arrays, options.epochs, options.batch_size, options.learning_rate, seed)
    results: list[train_by_hand.Trained] = []
    backend = LocalBackend(options.num_proc)
    taken = seconds(lambda: results.extend(backend.run(train_by_hand.train, args=arguments)))
    net = Net()
    net.load_state_dict(results[0].state)
    loop = max(result.seconds for result in results)
    return Fitted(net, taken, {"launch": taken - loop, "training": loop})


def fit_distributed(
    frame: DataFrame, options: argparse.Namespace, seed: int, folder: str
) -> Fitted:
    settings = (options.epochs, options.batch_size, options.learning_rate, seed)
    results: list[train_by_hand.Trained] = []

    def train() -> None:
        results.append(train_by_hand.distribute(frame, Path(folder), options.num_proc, settings))

    taken, loop = seconds(train), results[0].seconds
    net = Net()
    net.load_state_dict(results[0].state)
    return Fitted(net, taken, {"prepare, launch and reading": taken - loop, "training": loop})


def contenders(
    frame: DataFrame, options: argparse.Namespace, folder: Path
) -> dict[str, Callable[[int], Fitted]]:
    """Return each contender's fit of the rows, as a function of a seed."""

    def in_folder(fit: Callable[..., Fitted]) -> Callable[[int], Fitted]:
        return lambda seed: fit(frame, options, seed, tempfile.mkdtemp(dir=folder))

    return {
        OURS: in_folder(fit_ours),
        BASELINE: in_folder(fit_baseline),
        DISTRIBUTOR: in_folder(fit_distributed),
        BY_HAND: lambda seed: fit_by_hand(folder, options, seed),
    }


def save_arrays(frame: DataFrame, folder: Path) -> Arrays:
    """Save the rows for the loop by hand, and return those of validation."""
    validation = collect(frame.where("is_validation"))
    train_by_hand.save(folder, "train", collect(frame.where("not is_validation")))
    train_by_hand.save(folder, "validation", validation)
    return validation


def measure(
    frame: DataFrame, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[Fitted]], Arrays]:
    """Fit with each contender in turn, the requested number of times."""
    validation = save_arrays(frame, folder)
    fits = contenders(frame, options, folder)
    fitted: dict[str, list[Fitted]] = {name: [] for name in fits}
    for repeat in range(options.repeats):
        for name, fit in fits.items():
            fitted[name].append(fit(repeat))
            print(f"{name}: {fitted[name][-1].seconds:.1f} s", flush=True)
    return fitted, validation


def fit_first(name: str, options: argparse.Namespace) -> None:
    """Fit once with a contender, as the first fit of this process, and print its times as JSON."""
    with (
        spark_session(options.num_proc) as spark,
        tempfile.TemporaryDirectory(prefix="hvd-estimators-bench-") as folder,
    ):
        frame = regression_data(spark, options.rows)
        if name == BY_HAND:
            save_arrays(frame, Path(folder))
        fitted = contenders(frame, options, Path(folder))[name](0)
    print(json.dumps([fitted.seconds, fitted.parts]), flush=True)


def measure_first(options: argparse.Namespace) -> dict[str, list[Fitted]]:
    """Fit with each contender in turn, each time in a fresh process."""
    fitted: dict[str, list[Fitted]] = {name: [] for name in (OURS, BASELINE, DISTRIBUTOR, BY_HAND)}
    for _ in range(options.repeats):
        for name, fits in fitted.items():
            command = [sys.executable, "-m", "benchmarks.fit", *sys.argv[1:], "--first", name]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            taken, parts = json.loads(printed.splitlines()[-1])
            fits.append(Fitted(Net(), taken, parts))
            print(f"{name}, first fit: {taken:.1f} s", flush=True)
    return fitted


def main() -> None:
    options_parser = parser(__doc__, rows=400_000, repeats=3)
    options_parser.add_argument("--epochs", type=int, default=2)
    options_parser.add_argument("--num-proc", type=int, default=2, help="ranks and task slots")
    options_parser.add_argument("--batch-size", type=int, default=256, help="rows on each rank")
    options_parser.add_argument(
        "--learning-rate", type=float, default=1e-3, help="of one rank; all multiply it by ranks"
    )
    options_parser.add_argument(
        "--first", metavar="CONTENDER", help="fit only once with this contender, in this process"
    )
    options = options_parser.parse_args()
    need_baseline()
    if options.first:
        fit_first(options.first, options)
        return
    first = measure_first(options)
    with (
        spark_session(options.num_proc) as spark,
        tempfile.TemporaryDirectory(prefix="hvd-estimators-bench-") as folder,
    ):
        # Let the JVM compile the shared code before either estimator is measured.
        warm_up = regression_data(spark, WARM_UP_ROWS)
        once = argparse.Namespace(**{**vars(options), "epochs": 1})
        for fit in (fit_ours, fit_baseline, fit_distributed):
            fit(warm_up, once, 0, tempfile.mkdtemp(dir=folder))
        few = regression_data(spark, options.rows // SHARE_OF_FEW)
        frame = regression_data(spark, options.rows)
        fitted_few, _ = measure(few, options, Path(folder))
        fitted, validation = measure(frame, options, Path(folder))
        few.unpersist()
    report(fitted, fitted_few, first, validation, options)


if __name__ == "__main__":
    main()
