"""Time `prepare_data` against Spark's plain Parquet write and horovod.spark's `prepare_data`.

The plain write converts vectors to arrays of 32-bit floats, as `prepare_data` must. It writes as
many files from as many tasks. It checks nothing, reads no footers and writes no manifest. Another
one deals the rows to its files at random, as shuffling must. All become faster for about ten turns,
until the JVM has compiled the code of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.common import need_baseline, regression_data, spark_and_folder
from benchmarks.figures import compared, in_turns, options, show_result
from hvd_estimators import Store, prepare_data

RANKS, FILES_PER_RANK = 2, 10
WARM_UP_ROWS = 4000


def ways(frame: DataFrame, folder: Path) -> dict[str, Callable[[], None]]:
    """Return writers of the same rows, each of which writes to a new folder."""
    arguments: dict[str, Any] = {
        "num_processes": RANKS,
        "df": frame,
        "label_columns": ["label"],
        "feature_columns": ["features"],
        "partitions_per_process": FILES_PER_RANK,
    }

    def new() -> str:
        return tempfile.mkdtemp(dir=folder)

    def ours(shuffle: bool) -> None:
        with prepare_data(store=Store.create(new()), shuffle_on_write=shuffle, **arguments):
            pass

    features = vector_to_array("features", "float32").alias("features")
    written, files = frame.select(features, "label"), RANKS * FILES_PER_RANK

    def plain(rows: DataFrame) -> None:
        rows.write.parquet(f"file://{new()}/plain")

    def baseline() -> None:
        from horovod.spark.common.util import clear_training_cache, prepare_data

        from benchmarks import baseline

        clear_training_cache()
        with prepare_data(store=baseline.make_store(new()), **arguments):
            pass

    return {
        "prepare_data": lambda: ours(True),
        "prepare_data, not shuffled": lambda: ours(False),
        "plain write": lambda: plain(written.coalesce(files)),
        "plain write, dealt at random": lambda: plain(written.repartition(RANKS, F.rand())),
        "horovod.spark": baseline,
    }


def main() -> None:
    given = options(__doc__, rows=400_000, repeats=15)
    need_baseline()
    with spark_and_folder(RANKS) as (spark, folder):
        # Let the JVM compile the shared code before any way is measured.
        in_turns(ways(regression_data(spark, WARM_UP_ROWS), folder), 1)
        taken = in_turns(ways(regression_data(spark, given.rows), folder), given.repeats)
    records = compared("without validation", taken, "s", "plain write")
    show_result("prepare", vars(given), records)


if __name__ == "__main__":
    main()
