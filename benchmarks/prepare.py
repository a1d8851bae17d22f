"""Time `prepare_data` against Spark's plain Parquet write and horovod.spark's `prepare_data`."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.common import need_baseline, regression_data, spark_session
from benchmarks.figures import compared, parser, seconds, show_result, show_table
from hvd_estimators import Store, prepare_data

OVER_PLAIN = {True: 1.6, False: 1.25}
"""Maximum time as a multiple of the plain write's, with shuffling and without."""

UNDER_BASELINE = 5.0
"""Minimum speed as a multiple of horovod.spark's."""

OURS, UNSHUFFLED = "prepare_data", "prepare_data, not shuffled"
PLAIN, BASELINE = "plain write", "horovod.spark"
WARM_UP_ROWS = 4000


class Ways:
    """Writers of the same rows, features and label, each into a separate folder.

    The plain write converts vectors to arrays of 32-bit floats, as `prepare_data` must. It writes
    as many files from as many tasks. With validation, it also writes both splits in one job, into
    the folders of a partition column. It checks nothing, reads no footers and writes no manifest.
    """

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options = options
        self.folder = folder
        self.numbers = itertools.count()

    def ours(
        self, frame: DataFrame, validation: str | None, shuffle: bool = True
    ) -> Callable[[], None]:
        store = Store.create(f"{self.new_folder()}/store")
        arguments = self.arguments(store, frame, validation)

        def prepare() -> None:
            with prepare_data(**arguments, shuffle_on_write=shuffle):
                pass

        return prepare

    def plain(self, frame: DataFrame, validation: str | None) -> Callable[[], None]:
        features = vector_to_array("features", "float32").alias("features")
        split = [F.col(validation).alias("split")] if validation else []
        files = self.options.num_proc * self.options.partitions_per_process
        writer = frame.select(features, "label", *split).coalesce(files).write
        if validation:
            writer = writer.partitionBy("split")
        path = f"file://{self.new_folder()}/plain"
        return lambda: writer.parquet(path)

    def baseline(self, frame: DataFrame, validation: str | None) -> Callable[[], None]:
        from horovod.spark.common.util import clear_training_cache, prepare_data

        from benchmarks import baseline

        arguments = self.arguments(baseline.make_store(self.new_folder()), frame, validation)
        clear_training_cache()

        def prepare() -> None:
            with prepare_data(**arguments):
                pass

        return prepare

    def arguments(self, store: Any, frame: DataFrame, validation: str | None) -> dict[str, Any]:
        return {
            "num_processes": self.options.num_proc,
            "store": store,
            "df": frame,
            "label_columns": ["label"],
            "feature_columns": ["features"],
            "validation": validation,
            "partitions_per_process": self.options.partitions_per_process,
        }

    def new_folder(self) -> str:
        folder = Path(self.folder, str(next(self.numbers)))
        folder.mkdir()
        return str(folder)


def measure(
    frame: DataFrame, ways: Ways, validation: str | None, repeats: int
) -> dict[str, list[float]]:
    """Prepare in each way in turn."""
    taken: dict[str, list[float]] = {name: [] for name in (OURS, UNSHUFFLED, PLAIN, BASELINE)}
    for _ in range(repeats):
        taken[OURS].append(seconds(ways.ours(frame, validation)))
        taken[UNSHUFFLED].append(seconds(ways.ours(frame, validation, shuffle=False)))
        taken[PLAIN].append(seconds(ways.plain(frame, validation)))
        taken[BASELINE].append(seconds(ways.baseline(frame, validation)))
        print(", ".join(f"{name}: {each[-1]:.2f} s" for name, each in taken.items()), flush=True)
    return taken


def report(taken: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    figures: dict[str, Any] = {}
    for title, times in taken.items():
        best = {name: min(each) for name, each in times.items()}
        over_plain = {
            True: best[OURS] / best[PLAIN],
            False: best[UNSHUFFLED] / best[PLAIN],
        }
        speedup = best[BASELINE] / best[OURS]
        show_table(
            f"{title}: {options.rows} rows, {options.num_proc} task slots, at most "
            f"{options.num_proc * options.partitions_per_process} files "
            f"(best of {options.repeats})",
            ["", "seconds", "of plain write", "of horovod.spark"],
            [
                [name, value, value / best[PLAIN], value / best[BASELINE]]
                for name, value in best.items()
            ],
        )
        met = speedup >= UNDER_BASELINE and all(
            over_plain[shuffle] <= most for shuffle, most in OVER_PLAIN.items()
        )
        print(
            f"\n{title}: prepare_data takes {over_plain[True]:.2f} times as long as the plain "
            f"write (target {OVER_PLAIN[True]:g}), {over_plain[False]:.2f} times without "
            f"shuffling (target {OVER_PLAIN[False]:g}), and is {speedup:.1f} times as fast as "
            f"horovod.spark's (target {UNDER_BASELINE:g}): {'met' if met else 'MISSED'}"
        )
        figures[title] = {
            "seconds": best,
            "all_seconds": times,
            "over_plain": over_plain[True],
            "over_plain_not_shuffled": over_plain[False],
            "speedup": speedup,
            "targets_met": met,
        }
    records = [
        record for title, times in taken.items() for record in compared(title, times, "s", PLAIN)
    ]
    show_result("prepare", vars(options), {"results": figures}, records)


def main() -> None:
    options_parser = parser(__doc__, rows=400_000, repeats=5)
    options_parser.add_argument("--num-proc", type=int, default=2, help="ranks and task slots")
    options_parser.add_argument(
        "--partitions-per-process", type=int, default=10, help="files per rank, at most"
    )
    options = options_parser.parse_args()
    need_baseline()
    with (
        spark_session(options.num_proc) as spark,
        tempfile.TemporaryDirectory(prefix="hvd-estimators-bench-") as folder,
    ):
        ways = Ways(options, folder)
        cases = {"without validation": None, "with validation": "is_validation"}
        # Let the JVM compile the shared code before any way is measured.
        warm_up = regression_data(spark, WARM_UP_ROWS)
        for validation in cases.values():
            measure(warm_up, ways, validation, 1)
        frame = regression_data(spark, options.rows)
        report(
            {
                title: measure(frame, ways, validation, options.repeats)
                for title, validation in cases.items()
            },
            options,
        )


if __name__ == "__main__":
    main()
