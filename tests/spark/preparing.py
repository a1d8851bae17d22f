"""Frames to prepare, and helpers to read prepared files directly."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import functions as F

from hvd_estimators import prepare_data
from hvd_estimators.data.arrays import table_to_columns
from hvd_estimators.prepare.datasets import load_manifest


def numbers(spark: Any, rows: int = 200, partitions: int = 3) -> Any:
    """Return spark.range with a doubled column, and with a column of rows to validate on."""
    return spark.range(0, rows, 1, partitions).select(
        "id", (F.col("id") * 2.0).alias("x"), (F.col("id") % 5 == 0).alias("held_out")
    )


def index_of(store: Any, frame: Any, labels: Any = ("id",), **options: Any) -> str:
    with prepare_data(1, store, frame, labels, **options) as index:
        return index


def read(store: Any, frame: Any, labels: Any = ("id",), **options: Any) -> Any:
    """Prepare a dataset and return the columns of its training and validation files."""
    with prepare_data(1, store, frame, labels, **options) as index:
        manifest = load_manifest(store, index)
        splits = [manifest.train, *([manifest.validation] if manifest.validation else [])]
        columns = []
        for split in splits:
            files = sorted(Path(split.path).glob("*.parquet"))
            table = pa.concat_tables([parquet.read_table(file) for file in files])
            assert table.num_rows == split.rows
            columns.append(table_to_columns(table, manifest.columns))
        return columns


def jobs_of(spark: Any, action: Any) -> int:
    """Return the number of Spark jobs that an action starts."""
    context = spark.sparkContext
    group = uuid.uuid4().hex
    context.setJobGroup(group, "")
    try:
        action()
        context._jsc.sc().listenerBus().waitUntilEmpty()
        return len(context.statusTracker().getJobIdsForGroup(group))
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description"):
            context.setLocalProperty(name, None)
